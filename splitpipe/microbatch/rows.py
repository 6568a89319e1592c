"""How each value of a call is split into microbatches: the rule for the batch.

    the batch        the first dimension of the first tensor, or of what ``batched=`` names
    its size         tensors are split along that dimension, and lists between their entries
    one entry        whole
    k times as many  an error that shows both readings; "groups" splits k entries with each row
    any other size   whole, with a warning if the size is none of a tensor that is split

A list may have one entry per row, or hold tensors that are each split. If sizes allow both, it is an error, too.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from splitpipe.microbatch.chunk_spec import GROUPS, NESTED, ROWS, flags_inside, misfit
from splitpipe.microbatch.tree import Nesting, described, hidden, open_level


def chunk_rows(size: int, chunks: int) -> list[int]:
    """The rows of each microbatch: at most ``chunks``, none of which is empty unless the batch is."""
    step = max(1, -(-size // chunks))
    return [min(step, size - start) for start in range(0, size, step)] or [0]


class Node:
    """A value, its flag of ``batched=`` and the nodes inside. ``record``: not a list with one entry per row."""

    def __init__(self, value: Any, flag: Any, where: str, record: bool = False) -> None:
        self.value, self.flag, self.where = value, flag, where
        self.times = 0  #: The number of entries per row, if it is split.
        self.named_dim = flag if type(flag) is int else 0  #: The dimension that ``batched`` names; else the first.
        self.dim: int | None = None  #: The dimension along which a tensor is split.
        self.children: list[Node] | None = None
        nested = isinstance(flag, NESTED)
        self.listed = type(value) in (list, tuple) and not record and not nested
        level = None if isinstance(value, PackedSequence) else open_level(value)
        if flag == ROWS and not self.listed or nested and level is None and value is not None:
            raise misfit(where, flag, value)
        if level is None:
            self.flag = None if nested else flag  # An optional value may be left out.
            return
        flags = [None if self.listed and flag in (ROWS, GROUPS) else flag] * len(level.parts)
        if nested:
            flags = flags_inside(flag, value, level, where)
        self.rebuild = level.rebuild
        self.children = [Node(x, inner, f"{where}[{key!r}]") for key, x, inner in zip(level.keys, level.parts, flags)]

    def leaves(self, shared: bool = False) -> Iterator[Node]:
        """The leaves, from the first to the last; ``shared``: without those in lists that are split between entries."""
        if self.children is None:
            yield self
        for child in () if shared and self.times else self.children or ():
            yield from child.leaves(shared)

    def tensors(self) -> list[Tensor]:
        """The tensors inside that have dimensions."""
        return [leaf.value for leaf in self.leaves() if isinstance(leaf.value, Tensor) and leaf.value.dim()]

    def part(self, start: int, count: int) -> tuple[list[Node], Nesting]:
        """The leaves that a microbatch with these rows gets, or gets a part of, and their nesting."""
        if self.children is None:
            return [self], None
        stop = (start + count) * self.times if self.times else None
        parts = [child.part(start, count) for child in self.children[start * self.times : stop]]
        return [leaf for leaves, _ in parts for leaf in leaves], (self.rebuild, [nesting for _, nesting in parts])


class Reading:
    """Reads the values of a call, and notes in their nodes how they are split.

    ``chunks``: if there may be several microbatches, a value with two readings is an error. ``size``: of a target, the
    number of rows, which all its tensors have to have.
    """

    def __init__(self, root: Node, chunks: int, size: int | None = None) -> None:
        self._root, self._chunks, self._target = root, chunks, size is not None
        self.batch = "the input"  #: The value that has shown the number of rows.
        self.size: int = self._find_size() if size is None else size
        self._decide(root)

    def warn(self, warned: set[str]) -> None:
        """Warns, once, of each tensor that goes whole and has a first dimension that no tensor that is split has."""
        leaves = [x for x in self._root.leaves(shared=True) if isinstance(x.value, Tensor) and x.value.dim()]
        # A mask, or positions, have a size in common with what they are used with.
        known = {0, 1, *[size for leaf in leaves if leaf.times for size in leaf.value.shape]}
        for node in leaves:
            if node.flag is None and node.value.size(0) not in known and node.where not in warned:
                warned.add(node.where)
                warnings.warn(
                    f"{node.where} has the shape {[*node.value.shape]}, but {self.batch} has {self.size} rows: every "
                    "microbatch gets all of it. That is wrong for something of each row, such as images, edges or "
                    f"offsets of packed sequences: write split=. Otherwise, write batched={written(node, False)}.",
                    stacklevel=2,
                )

    def _find_size(self) -> int:
        items = shown(self._root)
        if not items:
            raise TypeError(
                f"{self._root.where} holds no tensor with a first dimension to split into microbatches: expected a "
                "tensor, or a nesting of containers with one in it, that batched= doesn't mark False; or split=."
            )
        (first, sizes), *others = items
        self.batch, self.size = first.where, sizes[0]
        # Another value decides if only one of the sizes matches it.
        matching = [[size for size in sizes if size in other] for _, other in others]
        decided = {each[0] for each in matching if len(each) == 1}
        if len(decided) == 1:
            return decided.pop()
        if len(sizes) > 1:
            self._refuse(first, f"{sizes[0]} rows, one entry each", f"a batch of {sizes[1]} rows", ROWS, 0)
        return sizes[0]

    def _decide(self, node: Node) -> None:
        x, flag = node.value, node.flag
        if isinstance(x, Tensor) and x.dim() and flag is not False:  # One without dimensions is always whole.
            node.times = self._count(node, x.size(node.named_dim))
            node.dim = node.named_dim % x.dim() if node.times else None
        elif node.listed and (flag is None or flag is True or flag in (ROWS, GROUPS)):
            node.times = self._count(node, len(x))
        for child in () if node.times else node.children or ():
            self._decide(child)

    def _count(self, node: Node, size: int) -> int:
        """The entries per row of a tensor or list of ``size`` entries; 0 if it is whole, or split inside."""
        rows, flag, x, listed = self.size, node.flag, node.value, node.children is not None
        times = size // rows if rows and size % rows == 0 else int(size == rows)
        if flag in (ROWS, GROUPS) or not listed and (flag is not None or self._target):
            if not times or times > 1 and flag != GROUPS:
                raise ValueError(
                    f"{node.where} has {size} entries, but the batch has {rows} rows, as {self.batch} has them: "
                    f"expected {'k for each row' if flag == GROUPS else 'as many'}. Reshape it, or change batched=."
                )
            return times
        # A list of tensors that have the batch each is split inside, unless it has as many entries, too.
        inner = listed and {tensor.size(0) for tensor in node.tensors()} == {rows}
        if listed and (inner and size != rows or not alike(x)):
            return 0
        if inner and times == 1:
            one, latter = f"one entry for each of {rows} rows", f"tensors whose first dimension is the {rows} rows"
            self._refuse(node, one, latter, ROWS, 0)
        elif times > 1:
            one = f"{times} entries for each of the {rows} rows of {self.batch}"
            self._refuse(node, one, "one value for all rows", GROUPS, False)
        elif not times and not listed and x.dim() > 2 and size > 1 and x.size(1) == rows:
            self._refuse(node, f"the {rows} rows of {self.batch} along dimension 1", "no rows", 1, False)
        return int(times == 1 and not inner)

    def _refuse(self, node: Node, one: str, other: str, first: Any, latter: Any) -> None:
        """For several microbatches, raises the error about two readings, which shows how ``batched`` says either."""
        if min(self.size, self._chunks) < 2:
            return
        shapes = ", ".join([str([*x.shape]) for x in node.tensors()[:3]]) + ", ..." * (len(node.tensors()) > 3)
        what = f"has the shape {shapes}"
        if node.children is not None:
            what = f"is {described(node.value)}" + (f", with tensors of shapes {shapes}" if shapes else "")
        raise ValueError(
            f"{node.where} {what}: it could be {one}, or {other}. Which one is expected? In SplitPipe(..., batched=), "
            f"write {written(node, first)} for the former, {written(node, latter)} for the latter."
        )


def shown(root: Node) -> list[tuple[Node, list[int]]]:
    """The tensors and lists that may show the number of rows, and these; first what is named, and has tensors."""
    return sorted(_shown(root), key=lambda item: (item[0].flag is None, not item[0].tensors()))


def _shown(node: Node) -> Iterator[tuple[Node, list[int]]]:
    x, flag = node.value, node.flag
    if flag is False or flag == GROUPS:
        return
    if isinstance(x, Tensor) and x.dim() or flag == ROWS:
        yield node, [len(x) if node.listed else x.size(node.named_dim)]
    elif node.listed and (flag is None or flag is True) and alike(x) and not isinstance(x[0], (int, float)):
        inner = {tensor.size(0) for tensor in node.tensors()}
        yield node, [*dict.fromkeys([len(x), *(inner if len(inner) == 1 else ())])]
    else:
        for child in node.children or ():
            yield from _shown(child)


def rows_of(root: Node) -> int:
    """The rows of a microbatch, from the first tensor or list that may show it."""
    for _, sizes in shown(root):
        return sizes[0]
    objects = [leaf.value for leaf in root.leaves() if leaf.flag is not False and not isinstance(leaf.value, Tensor)]
    for packed in [x for x in objects if isinstance(x, PackedSequence)]:
        return int(packed.batch_sizes[0])
    return next((x.shape[0] for value in objects for x in hidden(value) if x.dim()), 1)


def written(node: Node, flag: Any) -> str:
    """``batched=`` for an argument; for a value inside one, and for an input, the flag alone."""
    name = node.where.removeprefix("argument ")
    return f"{{{name}: {flag!r}}}" if name.endswith("'") else repr(flag)


def alike(values: list[Any] | tuple[Any, ...]) -> bool:
    """True if values are of one kind: tensors with the same dtype and number of dimensions, dicts, strings, numbers."""
    entries = [x for x in values if x is not None]
    kinds = {Tensor if isinstance(x, Tensor) else float if isinstance(x, (int, float)) else type(x) for x in entries}
    tensors = {(x.dtype, x.dim()) for x in entries if isinstance(x, Tensor)}
    return len(kinds) == 1 and len(tensors) < 2 and not callable(entries[0])
