"""The outputs of microbatches, made one: joined along the batch, averaged, taken from the first, or dropped.

    a tensor with dimensions      joined along that of the batch
    the same for any rows         the tensor: a weight, positions
    a number                      made one, see ``reducing``
    equal values                  the value
    an object, such as a cache    None: no rows can be told in it

Which dimension is the batch's, a run of another number of rows shows: the one that differs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.microbatch import join, same
from splitpipe.core.torch_private import TreeSpec, tree_flatten, tree_unflatten
from splitpipe.segments.reducing import Reducer

_PLAIN = (torch.Size, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclasses.dataclass
class _Fields:
    """A dataclass that pytree doesn't know, by its fields."""

    made: Any
    names: list[str]
    spec: TreeSpec

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Fields) and type(self.made) is type(other.made) and self.names == other.names
            and self.spec == other.spec
        )

    __hash__ = None  # type: ignore[assignment]


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of an output and its nesting: as a pytree, whose dataclasses are taken apart, too."""
    leaves, spec = tree_flatten(value, lambda x: type(x) is torch.Size)
    found: list[Any] = []
    parts: list[Any] = []
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [field.name for field in dataclasses.fields(leaf)]
            inner, nested = flatten([getattr(leaf, name, None) for name in names])
            found += inner
            parts.append((len(inner), _Fields(leaf, names, nested)))
        else:
            found.append(leaf)
            parts.append((1, None))
    return found, (spec, parts)


def unflatten(leaves: Sequence[Any], nesting: Any) -> Any:
    """The value that ``flatten`` took apart; dataclasses are copies of those that were given."""
    spec, parts = nesting
    made: list[Any] = []
    at = 0
    for count, fields in parts:
        inner = leaves[at : at + count]
        at += count
        made.append(inner[0] if fields is None else _filled(fields, inner))
    return tree_unflatten(made, spec)


def _filled(fields: _Fields, leaves: Sequence[Any]) -> Any:
    made = copy(fields.made)
    for name, value in zip(fields.names, unflatten(leaves, fields.spec)):
        object.__setattr__(made, name, value)  # It may be frozen.
    return made


#: For each leaf the dimension of the batch, or None if there is none.
Batches = list[int | None]


def batches(leaves: list[Any], rows: int, others: list[Any], other_rows: int) -> Batches:
    """The dimension of the batch in each leaf, from two outputs of different numbers of rows."""
    return [
        _batch(x.shape, rows, y.shape, other_rows) if isinstance(x, Tensor) and isinstance(y, Tensor) else 0
        for x, y in zip(leaves, others)
    ]


def _batch(shape: torch.Size, rows: int, other: torch.Size, other_rows: int) -> int | None:
    if len(shape) != len(other):
        return 0
    scaling = [d for d, (one, two) in enumerate(zip(shape, other)) if one != two and one * other_rows == two * rows]
    if len(scaling) > 1:
        raise ValueError(coupled(tuple(shape), rows))
    if scaling:
        return scaling[0]
    return None if shape == other and len(shape) else 0


def joined(
    outputs: Sequence[tuple[list[Any], Any]],
    rows: list[int],
    reducer: Reducer,
    known: Batches | None = None,
    verify: bool = False,
) -> Any:
    """The output for the batch. Raises a ValueError for what can't be joined.

    ``known``: the dimension of the batch in each leaf; None: the first. ``verify``: compare the leaves that have none.
    """
    if len(outputs) == 1:
        return unflatten(*outputs[0])
    first = outputs[0][1]
    for number, (_, nesting) in enumerate(outputs):
        if not _same_nesting(nesting, first):
            raise ValueError(
                f"microbatches 0 and {number} give outputs of different nesting, which can't be joined: {first[0]} and "
                f"{nesting[0]}. Return the same nesting for every microbatch, or use chunks=1."
            )
    columns = list(zip(*(leaves for leaves, _ in outputs)))
    if len(columns) == 1 and not isinstance(columns[0][0], (Tensor, *_PLAIN)):
        raise TypeError(
            f"the output is a {type(columns[0][0]).__name__}, of which every microbatch gives its own: expected "
            "tensors, in any nesting of tuple, list, dict, namedtuple and dataclass. Return these, or use chunks=1."
        )
    if known is None or len(known) != len(columns):
        for column in columns:
            _verify_rows(column, rows)
        known = [0] * len(columns)
    made = [
        reducer.reduced(k, _brought(column), rows) if all(reducer.gives(k, x) for x in column)
        else _one(list(column), rows, dim, verify)
        for k, (column, dim) in enumerate(zip(columns, known))
    ]
    return unflatten(made, first)


def _same_nesting(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and one[1] == other[1])


def _brought(column: Sequence[Any]) -> list[Any]:
    # A microbatch may have skipped the last stages, and have its values on another device.
    return [x.to(column[0].device) if isinstance(x, Tensor) else x for x in column]


def _one(column: list[Any], rows: list[int], dim: int | None, verify: bool) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if all(isinstance(x, _PLAIN) for x in column):
            return join(tuple(column))
        # Caches: they hold what each microbatch has computed, by rows that nobody can tell. (One that all microbatches
        # were given is the caller's own.)
        return first if all(same(first, x) for x in column) else None
    column = _brought(column)
    if dim is None and any(x.shape != first.shape for x in column):
        dim = 0  # Rows that were chosen: by chance as many of one row of the batch as of two.
    if first.dim() and dim is None:
        if verify and any(x is not first and not torch.equal(x, first) for x in column):
            raise ValueError(
                f"an output of shape {list(first.shape)} has no dimension of the batch, and another value for each "
                "microbatch, which nobody can make one: expected a tensor with the batch as a dimension, or the same "
                "for all rows. Leave it out, or return what it is computed from."
            )
        return first
    return torch.cat(column, dim) if dim else join(tuple(column))


def _verify_rows(column: Sequence[Any], rows: list[int]) -> None:
    """Refuses tensors whose second dimension grows with the rows, too: each row would have to see the whole batch."""
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in column]
    if len(set(rows)) > 1 and all(len(shape) > 1 and shape[1] == count for shape, count in zip(shapes, rows)):
        raise ValueError(coupled(shapes[0], rows[0]))


def coupled(shape: tuple[int, ...], rows: int) -> str:
    """The message of an output that compares rows with each other."""
    return (
        f"an output of a microbatch of {rows} rows has the shape {list(shape)}, and another one with other rows: its "
        "second dimension is the batch, too, so each row is compared with all others, as in a contrastive loss. A "
        "pipeline's microbatches don't see each other: expected outputs of rows that stand alone. Return the features, "
        "and compute the rest from model(...); or use chunks=1."
    )


class Joiner:
    """Joins outputs, and knows from call to call where those of a kind have their batch."""

    def __init__(self) -> None:
        self._known: dict[str, Batches | None] = {}  # By the nesting of outputs.

    def joined(
        self,
        found: list[tuple[list[Any], Any]],
        rows: list[int],
        reducer: Reducer,
        again: Callable[[int], list[Any] | None],
        arguments: str,
    ) -> Any:
        """The outputs as one; ``again`` gives the leaves for another number of rows, or None if that can't be.

        ``arguments``: what the call was given beside tensors, by which its outputs may differ.
        """
        leaves, nesting = found[0]
        if len(rows) == 1 or not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            return joined(found, rows, reducer)
        dims = [leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves]
        key = f"{nesting[0]} {[fields and fields.names for _, fields in nesting[1]]} {dims} {arguments}"
        if key in self._known:  # On the CPU it takes no time to look again.
            on_cpu = all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, Tensor))
            return joined(found, rows, reducer, self._known[key], verify=on_cpu)
        other = 1 if rows[0] > 1 else 2
        made = again(other) if sum(rows) >= other else None
        known = None if made is None else batches(leaves, rows[0], made, other)
        whole = joined(found, rows, reducer, known, verify=True)
        if known is None or all(leaf.numel() for leaf in made or () if isinstance(leaf, Tensor)):
            # Of none of the rows it would show little.
            self._known[key] = known  # Not sooner: what can't be joined is refused each time.
        return whole
