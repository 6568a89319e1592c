"""The phase of a forward: an ordinary one, one that is checkpointed, or its repetition in backward."""
from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from splitpipe.core.thread_state import Bound

Phase = Literal["plain", "checkpointing", "recomputing"]
_phase: ContextVar[Phase] = ContextVar("splitpipe.phase", default="plain")


def in_phase(phase: Phase) -> Bound[Phase]:
    """Sets what is_checkpointing and is_recomputing say inside the block, in this context and copies of it."""
    return Bound(_phase, phase)


def is_checkpointing() -> bool:
    """Tells whether this forward is checkpointed: its saved tensors are dropped, and computed again in backward.

    Returns:
        True inside the first forward of a checkpointed microbatch, else False.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Tells whether this forward repeats an earlier one, in backward. A layer that counts its calls asks first.

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
