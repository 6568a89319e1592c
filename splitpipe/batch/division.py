"""A call's values, flattened, and how they are divided into microbatches."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from splitpipe.batch.tree import Node
from splitpipe.core import microbatch
from splitpipe.core.microbatch import Leaves, Rows
from splitpipe.core.torch_private import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, eq=False)
class Division:
    """Flat values, and the part of them that each microbatch gets."""

    leaves: Leaves
    spec: TreeSpec
    #: The dimension along which each leaf is split; None: every microbatch that has the leaf gets it whole.
    dims: list[int | None]
    rows: Rows
    #: The indices of each microbatch's leaves, and their nesting; None: each has all leaves.
    places: list[list[int]] | None = None
    specs: list[TreeSpec] | None = None
    #: Returns the values for some rows, given the first and their number, if rows are known.
    some: Callable[[int, int], Any] | None = None
    #: Returns the nesting and the indices of what is the same whatever the rows.
    constant: Callable[[], tuple[TreeSpec, list[int]]] | None = None

    #: The possible cause if a forward fails.
    hint: str = ""

    @cached_property
    def whole(self) -> frozenset[int]:
        """The indices of tensors with dimensions that several microbatches share."""
        if len(self.rows) == 1:
            return frozenset()
        found = frozenset(
            k for k, (leaf, dim) in enumerate(zip(self.leaves, self.dims))
            if dim is None and isinstance(leaf, Tensor) and leaf.dim()
        )
        if self.places is None or not found:
            return found
        counts = Counter(id(self.leaves[k]) for each in self.places for k in {*each} & found)
        return frozenset(k for k in found if counts[id(self.leaves[k])] > 1)

    def scattered(self) -> list[tuple[Leaves, TreeSpec]]:
        """The leaves of each microbatch, and their nesting."""
        if self.places is None or self.specs is None:
            return [(leaves, self.spec) for leaves in microbatch.scatter(self.leaves, self.rows, self.dims)]
        found: list[Leaves] = [[] for _ in self.rows]
        holders: list[list[int]] = [[] for _ in self.leaves]
        for i, places in enumerate(self.places):
            for k in places:
                holders[k].append(i)
        made = {}
        for k, (leaf, dim, holding) in enumerate(zip(self.leaves, self.dims, holders)):
            alone = dim is None and len(holding) == 1
            parts = [_alone(leaf)] if alone else microbatch.pieces(leaf, [self.rows[i] for i in holding], dim)
            made.update({(k, i): part for i, part in zip(holding, parts)})
        for i, places in enumerate(self.places):
            found[i] = [made[k, i] for k in places]
        return list(zip(found, self.specs))

    def kind(self) -> str:
        """A description of the arguments other than tensors and lists with one entry per row, to tell calls apart."""
        spec, chosen = (self.spec, range(len(self.leaves))) if self.constant is None else self.constant()
        given = [self.leaves[k] for k in chosen if isinstance(self.leaves[k], (bool, int, float, str))]
        # For other numbers, the type is enough: one that changes in each call, such as a time step, makes no new kind.
        return f"{spec} {[x if isinstance(x, (bool, str)) else type(x).__name__ for x in given]}"

    def having(self, i: int) -> Sequence[int]:
        """The indices of a microbatch's leaves."""
        return range(len(self.leaves)) if self.places is None else self.places[i]


def _alone(leaf: Any) -> Any:
    """A value that only one microbatch has: with a separate version counter if it is part of a tensor."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or not leaf._is_view() or leaf.is_inference():
        return microbatch.pieces(leaf, [(0, 1)], None)[0]
    return microbatch.pieces(leaf, [(0, 0), (0, leaf.shape[0])], 0)[1]  # The first piece shares the counter.


def divide(
    value: Any, nodes: Sequence[Node], dims: list[int | None], rows: Rows, build: Callable[[list[Any]], Any]
) -> Division:
    """The division of a value, which ``build`` makes from the parts of its nodes."""
    leaves, spec = tree_flatten(value, microbatch.is_batch_leaf)

    def numbers(start: int, stop: int) -> tuple[list[int], TreeSpec]:
        return tree_flatten(build([node.numbers(start, stop) for node in nodes]))

    def some(start: int, count: int) -> Any:
        chosen, nesting = numbers(start, start + count)
        return tree_unflatten([_some(leaves[k], dims[k], start, count) for k in chosen], nesting)

    if not any(map(_by_rows, nodes)):
        return Division(leaves, spec, dims, rows, some=some)

    def constant() -> tuple[TreeSpec, list[int]]:
        nesting = numbers(0, 1)[1]
        return nesting, [k for node in nodes for k in _constant(node)]

    places, specs = None, None
    if len(rows) > 1:
        flat = [numbers(start, start + count) for start, count in rows]
        places, specs = [each for each, _ in flat], [nesting for _, nesting in flat]
    return Division(leaves, spec, dims, rows, places, specs, some, constant)


def collected(parts: Sequence[Any], sizes: Sequence[int]) -> Division:
    """The division of values that are divided already, into ``sizes`` rows."""
    flat = [tree_flatten(part, microbatch.is_batch_leaf) for part in parts]
    leaves: Leaves = []
    places, rows, at = [], [], 0
    for (own, _), size in zip(flat, sizes):
        places.append(list(range(len(leaves), len(leaves) + len(own))))
        leaves += own
        rows.append((at, size))
        at += size
    specs = [spec for _, spec in flat]
    return Division(
        leaves, specs[0], [None] * len(leaves), rows, places, specs, constant=lambda: (specs[0], [])
    )


def undivided(value: Any, rows: int) -> Division:
    """A value as a single microbatch."""
    leaves, spec = tree_flatten(value, microbatch.is_batch_leaf)
    return Division(leaves, spec, [None] * len(leaves), [(0, rows)])


def absent(input: Division) -> Division:
    """None, as a target, for the microbatches of an input."""
    return Division([None], tree_flatten(None)[1], [None], input.rows)


def _some(leaf: Any, dim: int | None, start: int, count: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf if dim is None else leaf.narrow(dim, start, count)


def _constant(node: Node) -> Iterator[int]:
    if node.children is None:
        yield node.start
    elif not node.by_rows:
        for child in node.children:
            yield from _constant(child)


def _by_rows(node: Node) -> bool:
    return node.by_rows or any(map(_by_rows, node.children or ()))
