"""Notes on exceptions about where in the pipeline they were raised; and raising what another thread caught."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from splitpipe.core.torch_private import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def add_note(error: BaseException, text: str) -> None:
    """``BaseException.add_note``, also on Python 3.10, which has no such method."""
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list):  # Otherwise, something else is there, and the error matters more than the note.
        notes.append(text)


def raise_first(errors: list[BaseException]) -> None:
    """Raises the first error, if there is one, and empties the list."""
    # A traceback refers to the frames that it passes. If one of them referred to the error, that would be a cycle.
    if errors:
        error = errors[0]
        errors.clear()
        try:
            raise error
        finally:
            del error


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorates a function so that neither it nor what it calls is compiled."""
    skip = _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))
    return function
