"""Traces code that computes a module's numbers: its loss, and other values without rows.

That is the code between blocks, and in blocks that return a number. The first call of a kind, in which all blocks are
traced, shows which ones do. A kind of call that returns no numbers isn't traced again.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from splitpipe.batch.division import Division
from splitpipe.compiled.layers import runs_compiled
from splitpipe.compiled.theirs import user_compiled
from splitpipe.core.microbatch import hidden
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.facts import ROWS, Facts, Made, Share, Stack, tensors
from splitpipe.loss.row_numbers import numbers
from splitpipe.loss.terms import Number, Shifted, Unknown
from splitpipe.loss.trace import Trace


class Numbers:
    """What was found out about a model, kept from call to call."""

    def __init__(self) -> None:
        self._kinds: dict[Any, bool] = {}  # Whether calls of a kind return numbers.
        self._blocks: WeakSet[nn.Module] = WeakSet()

    def begin(self, kind: Any, input: Division) -> Tracing | None:
        """How to trace a call's forwards; None if it has one microbatch or returns no numbers."""
        rows = [count for _, count in input.rows]
        if len(rows) < 2 or not self._kinds.get(kind, True):
            return None
        shared = set.intersection(*({*input.having(i)} for i in range(len(rows))))
        plain = [input.leaves[k] for k in shared]
        numbers = frozenset(x for x in plain if isinstance(x, (int, float)) and not isinstance(x, bool))
        return Tracing(rows, numbers, self._blocks, kind not in self._kinds)

    def end(self, kind: Any, gave: bool) -> None:
        """Records the end of a call of this kind; ``gave``: whether it returned numbers."""
        self._kinds[kind] = gave


class Tracing:
    """How the forwards of one call are traced; ``all``: in all blocks."""

    def __init__(self, rows: Sequence[int], given: frozenset[float], blocks: WeakSet[nn.Module], all: bool) -> None:
        self._rows = rows
        self._given = given
        self._blocks = blocks
        self._all = all
        self._known = frozenset(blocks)

    def trace(self, microbatch: int) -> Trace:
        """The trace of a microbatch, or of a part of its code."""
        return Trace(self._rows[microbatch], self._given)

    def sees(self, block: nn.Module) -> bool:
        """Whether a block's code is traced; compiled code can't be."""
        return (self._all or block in self._known) and not runs_compiled(block) and not user_compiled(block)

    def seen(self, block: nn.Module, gave: bool) -> None:
        """Records the call of a block that was traced; ``gave``: whether it has returned or left numbers."""
        if self._all and gave:
            self._blocks.add(block)


class TracedBlock:
    """A block's call under a separate trace, which starts from what is known about its arguments.

    It is used again when a checkpointed block is recomputed, since a trace may change how functions are called.
    """

    def __init__(
        self, call: Callable[..., Any], facts: Facts, trace: Callable[[], Trace], left: Callable[[], list[Tensor]]
    ) -> None:
        self._call = call
        self._facts: Facts | None = facts  # Until the block has run: a recomputation lives as long as its graph.
        self._trace = trace
        self._left = left  # The tensors that the block has left in attributes.
        self._reading = facts.reading  # Arguments may be counts.
        self._arguments: list[Made] = []
        self._axes: list[int | None] = []
        self._made: list[tuple[Made, int | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = self._trace()
        trace.facts.reading = self._reading
        with DisableTorchFunction():
            given = list(tensors((args, kwargs)))
            facts = self._facts
            if facts is not None:
                known = [facts.of(x) for x in given]
                self._axes = [facts.turned(x) for x in given]
                self._arguments = [made.detached() if isinstance(made, Number) else made for made in known]
                trace.facts.asked = facts.asked
            else:
                known = self._arguments
            for x, made, axis in zip(given, known, self._axes):
                trace.facts.put(x, made)
                if axis is not None:
                    trace.facts.turn(x, axis)
        with trace:
            value = self._call(*args, **kwargs)
        if facts is not None:
            with DisableTorchFunction():
                self._made = [(trace.facts.of(x), trace.facts.turned(x)) for x in tensors((value, self._left()))]
                facts.condition = facts.condition or trace.facts.condition
                facts.figures += trace.facts.figures
                facts.asked = trace.facts.asked
                if numbers(value):
                    facts.learn(trace.facts)
        return value

    def note(self, value: Any) -> bool:
        """Records, outside the block, what it has returned and left; returns whether numbers are among it."""
        facts, made = self._facts, self._made
        self._facts, self._made = None, []
        gave = bool(numbers(value))
        with DisableTorchFunction():
            for x, (each, axis) in zip(tensors((value, self._left())), made):
                assert facts is not None
                few = not x.dim() or x.numel() < facts.rows
                gave = gave or few or isinstance(each, (Number, Share, Stack, Shifted))
                facts.put(x, each if few or not isinstance(each, Unknown) else ROWS)
                if axis is not None:
                    facts.turn(x, axis)
        return gave


def note_arguments(facts: Facts, input: Division, i: int, leaves: Sequence[Any], values: Sequence[Any]) -> None:
    """Records a microbatch's arguments: with rows, belonging to one row each, or the same for all microbatches."""
    whole, places = input.whole, input.having(i)
    if input.places is not None and input.some is not None:  # Lists with one entry per row.
        alone = {
            id(leaf) for k, leaf in zip(places, leaves)
            if isinstance(leaf, Tensor) and leaf.dim() and input.dims[k] is None and k not in whole
        }
        for value in values:
            if isinstance(value, (list, tuple)) and len(value) == input.rows[i][1]:
                if all(id(x) in alone for x in tensors(value) if x.dim()):
                    facts.begin_rows(value)
    split = [leaf for k, leaf in zip(places, leaves) if k not in whole]
    facts.begin([*split, *(x for leaf in split if not isinstance(leaf, Tensor) for x in hidden(leaf))])
    for k, leaf in zip(places, leaves):
        if input.dims[k]:
            facts.turn(leaf, input.dims[k])  # type: ignore[arg-type]


def numbers_of(trace: Trace | None, leaves: Sequence[Any]) -> dict[int, Number | Unknown]:
    """What the numbers among an output's leaves consist of, by position."""
    if trace is None:
        return {}
    found = {k: trace.number(leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {k: made for k, made in found.items() if made is not None}
