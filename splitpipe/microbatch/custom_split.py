"""``split=``: a function of the user's divides calls, whose values no rule can divide."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from splitpipe.microbatch.division import Divider, Division, read_input, shown
from splitpipe.microbatch.tree import Node, flatten, hidden

#: ``split(args, kwargs, chunks)`` returns the arguments of each microbatch: a list of pairs (args, kwargs).
Split = Callable[[tuple[Any, ...], dict[str, Any], int], list[tuple[tuple[Any, ...], dict[str, Any]]]]


class CustomSplit:
    """Divides calls by a function; a schedule (``scheduled``) allows no more than ``chunks`` microbatches."""

    def __init__(self, divider: Divider, split: Split, chunks: int, scheduled: bool) -> None:
        self._divider, self._split, self._chunks, self._scheduled = divider, split, chunks, scheduled

    def divide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, unsplit: bool = False
    ) -> tuple[Division, Division | None]:
        """As ``Divider.divide``. A loss is a mean weighted by rows: with a target, by the rows of that."""
        if unsplit:
            return self._divider.divide(args, kwargs, target, unsplit)
        given = {**kwargs} if target is None else {**kwargs, "target": target}
        parts: list[Any] = [*self._split(args, given, self._chunks)]
        if not parts or not all([isinstance(own, tuple) and isinstance(named, Mapping) for own, named in parts]):
            raise TypeError(f"split returned {parts!r:.100}: expected a list of pairs (args, kwargs).")
        if self._scheduled and len(parts) > self._chunks:
            raise ValueError(f"split returned {len(parts)} parts for a schedule of {self._chunks}: expected no more.")
        parts = [(own, dict(named)) for own, named in parts]
        targets = [] if target is None else [named.pop("target") for _, named in parts]
        nodes = [self._divider.read(*own, **named) for own, named in parts]
        rows = [rows_of(read_input(x, self._divider.target_flags, "the target")) for x in targets]
        rows = rows or [rows_of(node) for node in nodes]
        return collect([node.value for node in nodes], rows), collect(targets, rows) if targets else None


def collect(parts: Sequence[Any], rows: Sequence[int]) -> Division:
    """The division of values that are divided already, into parts with these rows."""
    flat = [flatten(part) for part in parts]
    leaves = [leaf for own, _ in flat for leaf in own]
    numbers = iter(range(len(leaves)))
    places = [[next(numbers) for _ in own] for own, _ in flat]
    counts = Counter(map(id, leaves))
    shared = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() and counts[id(x)] > 1]
    return Division(
        leaves, [None] * len(leaves), [[]] * len(leaves), rows, places, [nesting for _, nesting in flat], frozenset(),
        frozenset(shared),
    )


def rows_of(root: Node) -> int:
    """The rows of a microbatch, from the first tensor or list that may show it."""
    for _, sizes in shown(root):
        return sizes[0]
    objects = [leaf.value for leaf in root.leaves if leaf.flag is not False and not isinstance(leaf.value, Tensor)]
    for packed in [x for x in objects if isinstance(x, PackedSequence)]:
        return int(packed.batch_sizes[0])
    return next((x.shape[0] for value in objects for x in hidden(value) if x.dim()), 1)
