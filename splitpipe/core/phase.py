"""The phase of a forward: ordinary, checkpointed, or repeated in backward."""
from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from splitpipe.core.thread_state import Bound

Phase = Literal["plain", "checkpointing", "recomputing"]
_phase: ContextVar[Phase] = ContextVar("splitpipe.phase", default="plain")


def in_phase(phase: Phase) -> Bound[Phase]:
    """Sets what is_checkpointing and is_recomputing return inside the block, in this context and copies of it."""
    return Bound(_phase, phase)


def is_checkpointing() -> bool:
    """Returns whether this forward is checkpointed: its saved tensors are dropped, and recomputed in backward.

    Returns:
        True inside the first forward of a checkpointed microbatch, otherwise False.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Returns whether this forward repeats an earlier one, in backward. Layers that count their calls should check it.

    Returns:
        True inside the recomputation of a checkpointed microbatch, otherwise False.

    Example:
        >>> class Counter(torch.nn.Module):
        ...     calls = 0
        ...     def forward(self, input):
        ...         self.calls += not is_recomputing()
        ...         return input
    """
    return _phase.get() == "recomputing"
