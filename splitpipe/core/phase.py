"""The phase of a forward: ordinary, checkpointed, or repeated in backward."""
from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

Phase = Literal["plain", "checkpointing", "recomputing"]
#: What is_checkpointing and is_recomputing look at; it is bound around F and R.
phase: ContextVar[Phase] = ContextVar("splitpipe.phase", default="plain")


def is_checkpointing() -> bool:
    """Returns whether this forward is checkpointed: its saved tensors are dropped, and recomputed in backward.

    Returns:
        True inside the first forward of a checkpointed microbatch, otherwise False.

    Example:
        >>> is_checkpointing()
        False
    """
    return phase.get() == "checkpointing"


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
    return phase.get() == "recomputing"
