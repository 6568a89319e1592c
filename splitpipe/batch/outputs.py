"""Combines the outputs of microbatches: joined along the batch, averaged, taken from the first, or dropped.

    a tensor with dimensions      joined along the batch dimension
    the same for any rows         the tensor: a weight, positions
    a number                      combined, see ``reducing``
    equal values                  the value
    an object, such as a cache    None, with a warning: its rows can't be identified

A run with another number of rows shows the dimension of the batch: the one that differs.
"""
from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from splitpipe.batch.dims import Batches, batches, coupled, without_rows
from splitpipe.batch.entries import Entries, ListReader, concatenated, has_list
from splitpipe.core.microbatch import join, same
from splitpipe.core.torch_private import TreeSpec, tree_flatten, tree_unflatten


class Reducer(Protocol):
    """Combines numbers of microbatches: see ``loss.reducing``."""

    def gives(self, column: Sequence[Any]) -> bool:
        """True for numbers from which the batch's number is made."""

    def reduced(self, column: Sequence[Tensor], rows: list[int]) -> Tensor:
        """The number of the batch."""


_NUMBERS = (torch.Size, int, float)
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
    """The leaves of an output and its nesting: as a pytree, in which dataclasses are flattened too."""
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
    """The value that ``flatten`` flattened; dataclasses are copies of the originals."""
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


def joined(
    outputs: Sequence[tuple[list[Any], Any]],
    rows: list[int],
    reducer: Reducer,
    known: Batches | None = None,
    verify: bool = False,
    others: Sequence[Any] = (),
) -> Any:
    """The output of the batch. Raises ValueError for what can't be joined.

    ``known``: the dimension of the batch in each leaf; None: the first. ``verify``: compare the leaves that have none.
    ``others``: these leaves for another number of rows, if known.
    """
    if len(outputs) == 1:
        return unflatten(*outputs[0])
    first = outputs[0][1]
    for number, (_, nesting) in enumerate(outputs):
        if not _same_nesting(nesting, first):
            raise ValueError(
                f"microbatches 0 and {number} return outputs with different nesting, which can't be joined: "
                f"{first[0]} and {nesting[0]}. Return the same nesting for every microbatch, or use chunks=1."
            )
    columns = list(zip(*(leaves for leaves, _ in outputs)))
    if len(columns) == 1 and not isinstance(columns[0][0], (Tensor, Entries, *_PLAIN)):
        raise TypeError(
            f"the output is a {type(columns[0][0]).__name__}, and every microbatch returns a different one: expected "
            "tensors, in any nesting of tuple, list, dict, namedtuple and dataclass. Return these, or use chunks=1."
        )
    if known is None or len(known) != len(columns):
        for column in columns:
            _verify_rows(column, rows)
        known = [0] * len(columns)
    made = [
        reducer.reduced(column, rows) if reducer.gives(column) else _one(list(column), dim, verify, other)
        for column, dim, other in zip(columns, known, others or [None] * len(known))
    ]
    return unflatten(made, first)


def _same_nesting(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and one[1] == other[1])


def _one(column: list[Any], dim: int | None, verify: bool, other: Any) -> Any:
    first = column[0]
    if isinstance(first, Entries):
        return concatenated(column)
    if not isinstance(first, Tensor):
        if all(isinstance(x, (Tensor, *_PLAIN)) for x in column):
            return join(tuple(column))
        if all(same(first, x) for x in column):
            return first  # An object that all microbatches were given belongs to the caller.
        warnings.warn(
            f"the output holds a {type(first).__name__}, and every microbatch returns a different one: None takes its "
            "place. Return tensors, in any nesting of tuple, list, dict, namedtuple and dataclass, or use chunks=1.",
            stacklevel=2,
        )
        return None
    # A microbatch may have skipped the last stages, so that its values are on another device.
    column = [x.to(first.device) if isinstance(x, Tensor) else x for x in column]
    if dim is None and any(x.shape != first.shape for x in column):
        dim = 0  # Selected rows: by chance, one row of the batch has as many as two.
    if first.dim() and dim is None:
        differs = verify and any(x is not first and not torch.equal(x, first) for x in column)
        if differs or isinstance(other, Tensor) and not _close(first, other.to(first.device)):
            raise ValueError(without_rows(list(first.shape)))
        return first
    return torch.cat(column, dim) if dim else join(tuple(column))


def _verify_rows(column: Sequence[Any], rows: list[int]) -> None:
    """Raises for tensors whose second dimension grows with the rows too: each row would need the whole batch."""
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in column]
    if len(set(rows)) > 1 and all(len(shape) > 1 and shape[1] == count for shape, count in zip(shapes, rows)):
        raise ValueError(coupled(shapes[0], rows[0]))


def separable(one: Any, other: Any, two: Any) -> bool:
    """True if outputs of microbatches can be joined to that of the batch, judging by those of two rows and of each."""
    reader = ListReader()
    flat = [flatten(each) for each in reader.marked([one, other, two], [1, 1, 2], "", lambda rows: None)]
    if not all([_same_nesting(nesting, flat[0][1]) for _, nesting in flat]):
        return False
    leaves, others, both = [leaves for leaves, _ in flat]
    try:
        dims = batches(leaves, 1, both, 2)
    except ValueError:  # Each row is compared with all others.
        return False
    columns = (leaves, 0), (others, 1)
    return all([_separable(x, y, dim, row) for each, row in columns for x, y, dim in zip(each, both, dims)])


def _separable(x: Any, y: Any, dim: int | None, row: int) -> bool:
    """True if the value of a row is its part of that of two rows, judging by size and numbers."""
    if isinstance(x, Entries):
        (leaves, nesting), (others, other) = flatten(x.values[0]), flatten(y.values[row])
        return _same_nesting(nesting, other) and all(map(_close, leaves, others))
    if not isinstance(x, Tensor):
        return isinstance(x, _PLAIN) and same(x, y)
    if not x.dim():
        return x.is_floating_point()
    if dim is None or x.dim() != y.dim():
        return _close(x, y)
    # Other sizes depend on the data: for example, rows are selected, or padded to the longest.
    fits = [*y.shape] == [size * 2 if d == dim else size for d, size in enumerate(x.shape)]
    each = x.shape[dim] if fits else 0
    part = y.narrow(dim, row * each, each) if fits else y
    return fits and _close(x, part) and not (
        each > 1 and _nearer((x, y.unflatten(dim, (each, 2)).select(dim + 1, row)), (x, part))
    )


def _close(x: Any, y: Any) -> bool:
    """True if two values are equal, up to the rounding errors of another batch size."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return isinstance(x, _PLAIN) and same(x, y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.allclose(x.to(wide), y.to(wide), rtol=0.02, atol=1e-4, equal_nan=True)


def _nearer(apart: tuple[Tensor, Tensor], adjacent: tuple[Tensor, Tensor]) -> bool:
    """True if values are equal in pairs of entries that are apart, not adjacent; all entries may be nearly equal."""
    if not _close(*apart):
        return False
    if not _close(*adjacent):
        return True
    x = apart[0]
    if not x.is_floating_point() or not x.numel():
        return False
    near, far = [(one - other).abs().nan_to_num(0).max() for one, other in (apart, adjacent)]
    noise = 100 * torch.finfo(x.dtype).eps * x.abs().nan_to_num(0, 0).max()
    return bool(far > 100 * near) and bool(far > noise)


class Inseparable(Exception):
    """Raised if the sizes of outputs aren't proportional to the rows, because they depend on the whole batch."""


def _verify_proportion(found: Sequence[tuple[list[Any], Any]], rows: list[int], known: Batches | None) -> None:
    for column, dim in zip(zip(*(leaves for leaves, _ in found)), known or ()):
        if dim is None or not all(isinstance(x, Tensor) and dim < x.dim() for x in column):
            continue
        if any(x.shape[dim] * rows[0] != column[0].shape[dim] * count for x, count in zip(column, rows)):
            raise Inseparable


def _verify_numbers(leaves: Sequence[Any], others: Sequence[Any], rows: int, other: int) -> None:
    """Raises for plain numbers and sizes that depend on the number of rows: no microbatch has the batch's."""
    for x, y in zip(leaves, others):
        if type(x) is type(y) and type(x) in _NUMBERS and not same(x, y):
            what, one, two = ("size", [*x], [*y]) if isinstance(x, torch.Size) else ("number", x, y)
            raise ValueError(
                f"the output has the {what} {one} for {rows} rows and {two} for {other}: no microbatch knows the "
                f"batch's {what}. Expected a {what} that doesn't depend on the rows. Return a tensor, such as "
                "x.new_ones(len(x)).sum(), or compute it outside the module."
            )


def _verify_adjacent(leaves: Sequence[Any], rows: int, others: Sequence[Any], other: int, known: Batches) -> None:
    """Raises for several entries per row in the order of torch.cat([x, y]): all first ones, then all second ones."""
    least = min(rows, other)
    for x, y, dim in zip(leaves, others, known):
        if dim is None or not isinstance(x, Tensor) or not isinstance(y, Tensor) or not x.dim():
            continue
        each, rest = divmod(x.shape[dim], rows)
        if each < 2 or rest or y.shape[dim] != each * other:
            continue
        apart, other_apart = [z.unflatten(dim, (each, -1)).narrow(dim + 1, 0, least) for z in (x, y)]
        adjacent, other_adjacent = [z.narrow(dim, 0, each * least) for z in (x, y)]
        if _nearer((apart, other_apart), (adjacent, other_adjacent)):
            raise ValueError(
                f"an output of a microbatch of {rows} rows has the shape {list(x.shape)}, with a row's {each} entries "
                f"{rows} apart, as after torch.cat([x, y]): joined microbatches would have another order than the "
                "batch. Expected a row's entries side by side, as after torch.stack([x, y], 1).flatten(0, 1), or a "
                "tuple of outputs with one entry per row each."
            )


class Joiner:
    """Joins outputs, and remembers from call to call where outputs of a kind have their batch."""

    def __init__(self) -> None:
        self._known: dict[str, Batches | None] = {}  # By the nesting of outputs.
        self._lists = ListReader()

    def joined(
        self,
        found: list[tuple[list[Any], Any]],
        rows: list[int],
        reducer: Reducer,
        again: Callable[[int], tuple[Any] | None],
        arguments: str,
        exact: bool,
    ) -> Any:
        """The joined outputs; ``again`` returns the output for another number of rows, or None if it can't be run.

        ``arguments``: the call's arguments other than tensors, on which outputs may depend. ``exact``: whether to raise
        Inseparable for sizes that aren't proportional to the rows.
        """
        if len(rows) == 1:
            return joined(found, rows, reducer)
        made: dict[int, tuple[Any] | None] = {}

        def once(count: int) -> tuple[Any] | None:
            if count not in made:
                made[count] = again(count)
            return made[count]

        first = unflatten(*found[0])
        values = None
        if has_list(first, rows[0]):  # It may have one entry per row.
            values = [first, *(unflatten(*each) for each in found[1:])]
            found = [flatten(value) for value in self._lists.marked(values, rows, f"{arguments} ", once)]
        leaves, nesting = found[0]
        if not any(leaf.dim() if isinstance(leaf, Tensor) else type(leaf) in _NUMBERS for leaf in leaves):
            return joined(found, rows, reducer)
        dims = [leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves]
        key = f"{nesting[0]} {[fields and fields.names for _, fields in nesting[1]]} {dims} {arguments}"
        if key in self._known:  # On the CPU, looking again takes no time.
            on_cpu = all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, Tensor))
            if exact:
                _verify_proportion(found, rows, self._known[key])
            return joined(found, rows, reducer, self._known[key], verify=on_cpu)
        other = 1 if rows[0] > 1 else 2
        more = once(other) if sum(rows) >= other else None
        known, others = None, []
        if more is not None:
            if values is not None:
                more = (self._lists.marked([*values, *more], [*rows, other], f"{arguments} ", once)[-1],)
            others = flatten(*more)[0]
            _verify_numbers(leaves, others, rows[0], other)
            known = batches(leaves, rows[0], others, other)
            _verify_adjacent(leaves, rows[0], others, other, known)
        if exact:
            _verify_proportion(found, rows, known)
        whole = joined(found, rows, reducer, known, verify=True, others=others)
        if known is None or all(leaf.numel() for leaf in others if isinstance(leaf, Tensor)):
            # With none of the rows, it would show little.
            self._known[key] = known  # Only now: what can't be joined raises each time.
        return whole
