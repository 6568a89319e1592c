"""Traces code that computes a module's numbers: its loss, and other values without rows.

That is the code between blocks, and in blocks without parameters, such as a criterion. A number that any other block
returns is unknown. A kind of call that returns no numbers isn't traced again.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from splitpipe.compiled.layers import is_compiled
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.ledger import Aggregate, HostReads, Ledger
from splitpipe.loss.numbers import Number, Unknown, tensors
from splitpipe.loss.trace import Trace
from splitpipe.microbatch.division import Division
from splitpipe.microbatch.tree import hidden


class Kinds:
    """Which kinds of a model's calls return numbers."""

    def __init__(self) -> None:
        self._kinds: dict[Any, bool] = {}

    def begin(self, kind: Any, input: Division, scheduled: bool) -> Tracing | None:
        """How to trace a call's forwards; None if it has one microbatch or returns no numbers."""
        return Tracing(input, scheduled) if len(input.rows) > 1 and self._kinds.get(kind, True) else None

    def end(self, kind: Any, gave: bool) -> None:
        """Records the end of a call of this kind; ``gave``: whether it returned numbers."""
        self._kinds[kind] = gave


class Tracing:
    """How the forwards of one call are traced."""

    def __init__(self, input: Division, scheduled: bool) -> None:
        self._input, self._scheduled = input, scheduled
        shared = [leaf for leaf, owner in zip(input.leaves, input.owners) if owner is None]
        self._given = [x for x in shared if type(x) in (int, float)]

    def trace(self, i: int) -> Trace:
        """The trace of a microbatch."""
        rows = [count for _, count in self._input.rows]
        dim = next((dim for dim in self._input.dims if dim is not None), 0)
        return Trace(Ledger(rows[i], max(rows), dim, self._given, self._scheduled))

    def begin(self, ledger: Ledger, i: int, leaves: Sequence[Any], values: Sequence[Any]) -> None:
        """Records a microbatch's arguments, and their leaves."""
        input, rows = self._input, self._input.rows[i][1]
        for k, leaf in zip(input.places[i], leaves):
            if k not in input.whole:
                ledger.begin(leaf if isinstance(leaf, Tensor) else [*hidden(leaf)], input.dims[k] or 0)
        if input.root is not None and any([owner is not None for owner in input.owners]):
            for value in values:
                if isinstance(value, (list, tuple)) and len(value) == rows:
                    ledger.begin_entries(value)

    def sees(self, block: nn.Module) -> bool:
        """Whether a block's code is traced; compiled code can't be."""
        return next(block.parameters(), None) is None and not any(map(is_compiled, block.modules()))

    def record(self, trace: Trace, block: nn.Module, described: str, value: Any, before: HostReads) -> None:
        """Records what a block has returned; ``before``: what Python had read."""
        ledger, traced = trace.ledger, self.sees(block)
        with DisableTorchFunction():
            numbers = ledger.note_numbers(value, "" if traced else described)
            for x in tensors((value,)):
                if traced and (x.numel() < ledger.rows or isinstance(ledger.of(x), Aggregate)):
                    ledger.put(x, ledger.of(x))  # Its graph may be another one now.
                    numbers = True
                else:
                    ledger.returned(x, described)
            if not numbers:
                ledger.host_reads = before


def numbers_of(trace: Trace | None, leaves: Sequence[Any]) -> dict[int, Number | Unknown]:
    """What the numbers among an output's leaves consist of, by position."""
    found = {k: trace.number(x) for k, x in enumerate(leaves) if isinstance(x, Tensor)} if trace is not None else {}
    return {k: number for k, number in found.items() if number is not None}
