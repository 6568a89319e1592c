"""Functions that run get another code, wherever they have been taken to since they were made."""
from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import CodeType, FunctionType


class Functions:
    """The package's functions, as they are now.

    Args:
        package: the folder whose files' functions count, with its last separator.

    Raises:
        LookupError: there are none.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._them: dict[tuple[str, str], list[FunctionType]] = {}
        gc.unfreeze()  # The tests' own setting has frozen what they have imported, and the collector names none of it.
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(package):
                self._them.setdefault(self.key(thing.__code__), []).append(thing)
        if not self._them:
            raise LookupError(f"found no functions of {package}: expected the package to be imported from there")

    def key(self, code: CodeType) -> tuple[str, str]:
        """File relative to the package, and qualified name."""
        return code.co_filename[len(self._package):], code.co_qualname

    def keys(self) -> list[tuple[str, str]]:
        return list(self._them)

    def replace(self, key: tuple[str, str], code: CodeType) -> None:
        """Gives them all this code.

        Raises:
            ValueError: for code that reads other variables of the functions around it.
            KeyError: there is no such function.
        """
        for function in self._them[key]:
            function.__code__ = code

    def called(self, does: Callable[[], object]) -> set[tuple[str, str]]:
        """Which of them are called while something is done, in any thread.

        Args:
            does: that.
        """
        seen: set[CodeType] = set()

        def trace(frame: object, event: str, value: object) -> None:
            seen.add(frame.f_code)  # type: ignore[attr-defined]

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            does()
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        # Other threads may still add some.
        return {self.key(code) for code in seen.copy() if code.co_filename.startswith(self._package)} & {*self._them}
