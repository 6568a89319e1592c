"""Functions that torch.compile does not compile by themselves.

Where a graph breaks, or ends at once (``nn.Linear(...).compile()`` compiles nothing), the compiler takes up each
Python function that is called next: a hook, a mode's handler. It would compile them again for every tensor they see,
until it gives up. A graph that calls such a function has it inlined all the same.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorates a function: neither it nor what it calls is compiled by itself."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
