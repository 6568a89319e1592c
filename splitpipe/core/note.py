"""Notes on exceptions about where in the pipeline they were raised; and code that isn't compiled."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from splitpipe.core.torch_private import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def add_note(error: BaseException, text: str) -> None:
    """``BaseException.add_note``, also on Python 3.10, which has no such method."""
    vars(error).setdefault("__notes__", []).append(text)


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorates a function so that neither it nor what it calls is compiled."""
    skip = _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))
    return function
