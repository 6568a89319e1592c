"""Which forward a layer is in: the ordinary one, a checkpointed one, or its recomputation.

The answer is a context variable and no thread-local: it must reach layers that run in worker threads, and
those of a SplitPipe that is itself a layer of another.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Phase = Literal["plain", "checkpointing", "recomputing"]

_phase: ContextVar[Phase] = ContextVar("splitpipe.phase", default="plain")


@contextmanager
def entered(phase: Phase) -> Iterator[None]:
    """Makes ``phase`` the answer inside the block, for this context alone."""
    token = _phase.set(phase)
    try:
        yield
    finally:
        _phase.reset(token)


def is_checkpointing() -> bool:
    """Whether this forward is checkpointed: what it saves is dropped, and computed again in backward.

    Returns:
        True inside the first forward of a checkpointed microbatch, else False.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Whether this forward repeats an earlier one, in backward. A layer that counts its calls asks first.

    Returns:
        True inside the recomputation of a checkpointed microbatch, else False.

    Example:
        >>> class Counter(torch.nn.Module):
        ...     calls = 0
        ...     def forward(self, input):
        ...         self.calls += not is_recomputing()
        ...         return input
    """
    return _phase.get() == "recomputing"
