"""Reads how to split a call's values: the number of rows, and for each value a dimension, its rows, or neither.

A list can have two meanings: tensors that are each split along their first dimension, or one entry per row. If the
sizes allow only one, that is used. If they allow both, an earlier call with other sizes decides; without one, it is an
error.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from splitpipe.batch.flags import ROWS
from splitpipe.batch.tree import Node
from splitpipe.core.microbatch import disagreement, hidden, nothing_to_cut, verify_strided

TENSORS, WHOLE = "tensors", "whole"
#: A tuple of up to this many numbers might be a size as well as one number per row.
_LONGEST_SIZE = 4


class AmbiguousBatchError(ValueError):
    """Raised if the sizes of a call allow two readings."""


class Memory:
    """The readings of earlier calls, by a list's place and length."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, int]] = {}

    def note(self, node: Node, reading: str) -> None:
        """Records the reading that the sizes of a call have shown."""
        self._known[node.where] = reading, len(node.value)

    def of(self, node: Node) -> str | None:
        """The reading that an earlier call has shown. A list without rows has the same length each time."""
        reading, length = self._known.get(node.where, (None, 0))
        return reading if reading == ROWS or length == len(node.value) else None


class Reading(NamedTuple):
    """How to split the leaves of a call; lists that are split by rows are marked in their nodes."""

    size: int
    #: The dimension of each leaf that is split along one.
    dims: list[int | None]
    #: The ambiguity, if one microbatch runs; with several, it is an error.
    doubt: AmbiguousBatchError | None


def rows_of(nodes: Sequence[Node]) -> int:
    """The rows of a microbatch, from the first tensor or list that may show it."""
    items = [item for node in nodes for item in _items(node)]
    said = [item for item in items if item.flag is not None]
    objects = [leaf.value for node in nodes for leaf in node.leaves() if leaf.flag is not False]
    inside = (x.shape[0] for value in objects if not isinstance(value, Tensor) for x in hidden(value) if x.dim())
    return next((size for item in said or items for size in _sizes(item)), None) or next(inside, 1)


class Reader:
    """Reads the nodes of a call.

    ``optional``: whether tensors of another size than the batch's are whole; ``else_along``: another dimension along
    which an unmarked tensor may be split; ``disagree`` makes the error for tensors that differ in size.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        whose: str,
        memory: Memory,
        *,
        optional: bool = False,
        else_along: int = 0,
        disagree: Callable[[list[int], list[int]], ValueError] | None = None,
    ) -> None:
        self._nodes = nodes
        self._whose = whose
        self._memory = memory
        self._optional = optional
        self._else_along = else_along
        self._disagree = disagree or partial(disagreement, whose=whose, can_say=True)

    def read(self, size: int | None = None, strict: bool = True) -> Reading:
        """The reading for a batch of ``size`` rows (None: found here). ``strict``: raise if it is ambiguous."""
        stop = self._nodes[-1].stop if self._nodes else 0
        dims: list[int | None] = [None] * stop
        try:
            rows = self._size() if size is None else size
            if rows is None:
                leaves = [leaf for node in self._nodes for leaf in node.leaves()]
                said = any(leaf.flag is False for leaf in leaves)
                raise nothing_to_cut([leaf.value for leaf in leaves], self._whose, said)
            for node in self._nodes:
                self._decide(node, rows, dims)
        except AmbiguousBatchError as doubt:
            if strict:
                raise
            for node in self._nodes:
                _forget(node)
            return Reading(rows_of(self._nodes), [None] * stop, doubt)
        return Reading(rows, dims, None)

    # The number of rows.

    def _size(self) -> int | None:
        items = [item for node in self._nodes for item in _items(node)]
        said = [node for node in items if node.flag is not None]
        chosen = said or items
        first = next((node for node in chosen if _sizes(node) and (not node.listed or node.tensors())), None)
        if first is None:  # There is no tensor: a list of strings, or of dicts.
            first = next((node for node in chosen if _sizes(node) and (said or not _numbers(node))), None)
        if first is None:
            return None
        sizes = _sizes(first)
        if len(sizes) == 1:
            return sizes[0]
        # Another value decides if only one of the sizes matches it.
        fitting = [[size for size in sizes if size in _sizes(node)] for node in items if node is not first]
        supported = {each[0] for each in fitting if len(each) == 1}
        if len(supported) == 1:
            return supported.pop()
        known = self._memory.of(first)
        if known is not None and len(sizes) == 2:
            return sizes[0] if known == ROWS else sizes[1]
        raise self._doubt(first, f"{sizes[0]} rows, one entry each", f"a batch of {sizes[1]} rows")

    # How to split each value.

    def _decide(self, node: Node, rows: int, dims: list[int | None], inside: bool = False) -> None:
        value, flag = node.value, node.flag
        if node.children is None:
            if isinstance(value, Tensor) and value.dim() and flag is not False:
                # A tensor without dimensions is whole, whatever its flag.
                dims[node.start] = self._dimension(node, rows)
            return
        if node.listed and flag == ROWS:
            if len(value) != rows:
                raise ValueError(
                    f"{node.where} has {len(value)} entries, and batched specifies one entry per row, but the batch "
                    f"has {rows} rows: expected as many entries as rows."
                )
            node.by_rows = True
        elif node.listed and (flag is None or flag is True) and self._by_rows(node, rows, inside):
            node.by_rows = True
        if not node.by_rows:
            inside = inside or type(value) in (list, tuple) and node.listed
            for child in node.children:
                self._decide(child, rows, dims, inside)

    def _dimension(self, node: Node, rows: int) -> int | None:
        x, dim = node.value, _along(node)
        _verify_dimension(node)
        other = self._else_along
        if node.flag is None and 0 < other < x.dim() and x.shape[other] == rows:
            if x.shape[0] == rows:
                raise AmbiguousBatchError(
                    f"{node.where} has the shape {list(x.shape)}: its dimension 0 or its dimension {other} could be "
                    f"the batch. Specify which in SplitPipe(..., batched={{'input': {other}, 'target': 0}}), or "
                    f"{other}."
                )
            dim = other
        if node.flag is None and self._optional and x.size(dim) != rows:
            return None
        verify_strided([x], self._whose)
        if x.size(dim) != rows:
            cut = [leaf for each in self._nodes for leaf in each.leaves()]
            cut = [leaf for leaf in cut if isinstance(leaf.value, Tensor) and _is_cut(leaf)]
            raise self._disagree([leaf.value.size(_along(leaf)) for leaf in cut], [_along(leaf) for leaf in cut])
        return dim % int(x.dim())

    def _by_rows(self, node: Node, rows: int, inside: bool) -> bool:
        """True if a list has one entry per row."""
        tensors, known = node.tensors(), self._memory.of(node)
        fits = len(node.value) == rows and node.alike()
        if not fits:
            self._memory.note(node, TENSORS if tensors else WHOLE)
            return False
        if tensors and node.common() == rows:
            if rows == 1:
                return False  # There is a single microbatch.
            if known is None:
                raise self._doubt(
                    node, f"one entry for each of {rows} rows", f"tensors whose first dimension is the {rows} rows"
                )
            return known == ROWS
        if not tensors and known == WHOLE:
            return False
        if type(node.value) is tuple and _numbers(node) and known is None:
            if inside:
                return False
            if rows <= _LONGEST_SIZE:
                raise self._doubt(node, f"one number for each of {rows} rows", "a value for all rows", whole=True)
        if rows > 1:
            self._memory.note(node, ROWS)
        return True

    def _doubt(self, node: Node, one: str, other: str, whole: bool = False) -> AmbiguousBatchError:
        latter: Any = False if whole else 0
        if node.children and not node.common() and all(child.listed for child in node.children):
            latter = (ROWS,) * len(node.children)
        inside = [list(x.shape) for x in node.tensors()[:3]]
        shapes = f", with tensors of shapes {', '.join(map(str, inside))}" if inside else ""
        more = ", ..." if len(node.tensors()) > 3 else ""
        return AmbiguousBatchError(
            f"{node.where} is a {type(node.value).__name__} of {len(node.value)}{shapes}{more}: it could be {one}, or "
            f"{other}. Specify which in SplitPipe(..., batched={written(node, ROWS)}) for the former, "
            f"batched={written(node, latter)} for the latter."
        )


def written(node: Node, flag: Any) -> str:
    """How to write batched= for a node."""
    place = node.where
    for prefix in ("argument ", "the input", "the target"):
        if place.startswith(prefix):
            owner, place = prefix, place[len(prefix):]
            break
    else:
        return repr(flag)
    if owner == "argument ":
        name, _, inner = place.partition("[")
        return f"{{{name}: {_nested(inner, flag)}}}"
    if owner == "the target":
        return f"{{'target': {_nested(place.removeprefix('['), flag)}}}"
    return _nested(place.removeprefix("["), flag)


def _nested(inner: str, flag: Any) -> str:
    keys = [key for key in inner.replace("]", "").split("[") if key]
    found = repr(flag)
    for key in reversed(keys):
        if key.isdigit():
            found = "(" + "True, " * int(key) + found + ("," if key == "0" else "") + ")"
        else:
            found = f"{{{key}: {found}}}"
    return found


def _numbers(node: Node) -> bool:
    return node.listed and any(isinstance(entry, (int, float)) for entry in node.value)


def _verify_dimension(node: Node) -> None:
    """Raises a ValueError if batched= names a dimension that a tensor doesn't have."""
    x, dim = node.value, _along(node)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{node.where} has the shape {list(x.shape)}, but batched specifies dimension {dim} as the batch: "
            f"expected a dimension from {-x.dim()} to {x.dim() - 1}."
        )


def _is_cut(leaf: Node) -> bool:
    """True for a tensor that has the dimension along which to split it."""
    dim = leaf.value.dim()
    return leaf.flag is not False and -dim <= _along(leaf) < dim


def _along(leaf: Node) -> int:
    return 0 if leaf.flag is None or leaf.flag is True else int(leaf.flag)


def _items(node: Node) -> Iterator[Node]:
    """The tensors and lists that may show the number of rows."""
    if node.flag is False:
        return
    if node.children is None:
        if isinstance(node.value, Tensor) and node.value.dim():
            yield node
    elif node.flag == ROWS or node.listed and (node.flag is None or node.flag is True) and node.alike():
        yield node
    else:
        for child in node.children:
            yield from _items(child)


def _sizes(node: Node) -> list[int]:
    """The numbers of rows that a tensor or list may have; for a list, first by its entries."""
    if node.children is None:
        if node.value.is_nested:
            verify_strided([node.value], "the input")
        _verify_dimension(node)
        return [node.value.size(_along(node))]
    if node.flag == ROWS:
        return [len(node.value)]
    # Lists in a tuple, such as images and targets, may have one entry per row themselves.
    inner = {len(child.value) if child.listed else -1 for child in node.children}
    found = [len(node.value), node.common(), inner.pop() if len(inner) == 1 else None]
    return list(dict.fromkeys(size for size in found if size is not None and size >= 0))


def _forget(node: Node) -> None:
    node.by_rows = False
    for child in node.children or ():
        _forget(child)
