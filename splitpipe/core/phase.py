"""Which forward a layer is in: the ordinary one, a checkpointed one, or its recomputation.

The answer is a context variable and no thread-local: it must reach layers that run in worker threads, and
those of a SplitPipe that is itself a layer of another.
"""
from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from splitpipe.core.variable import Bound

Phase = Literal["plain", "checkpointing", "recomputing"]

_phase: ContextVar[Phase] = ContextVar("splitpipe.phase", default="plain")


def entered(phase: Phase) -> Bound[Phase]:
    """Makes ``phase`` the answer inside the block, for this context alone."""
    return Bound(_phase, phase)


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
