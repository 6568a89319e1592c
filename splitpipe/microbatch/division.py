"""Divides a call into microbatches: how each value is split, and the part that each microbatch gets.

    the batch        the first dimension of the first tensor, or of what ``batched=`` names
    its size         tensors are split along that dimension, and lists between their entries
    one entry        whole
    k times as many  an error that shows both readings; "groups" splits k entries with each row
    any other size   whole, with a warning if the size is none of a tensor that is split

A list may have one entry per row, or hold tensors that are each split. If sizes allow both, it is an error, too.
"""
from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from splitpipe.core import stream
from splitpipe.core.tensors import is_plain
from splitpipe.microbatch.chunk_spec import GROUPS, NESTED, ROWS, flags_inside
from splitpipe.microbatch.messages import misfit, treated, two_readings, warn_of_whole, wrong_size
from splitpipe.microbatch.tree import PLAIN, Nesting, Node, alike, open_level, unflatten, verify_open

#: Classes of values that may be the same for every microbatch.
SHARED = (Tensor, *PLAIN, torch.layout, torch.memory_format, torch.Generator, enum.Enum, slice, range, type)


class Divider:
    """Divides calls into at most ``chunks`` microbatches; ``read`` returns the node of a call's arguments."""

    def __init__(self, read: Callable[..., Node], target_flags: Any, chunks: int) -> None:
        self.read, self.target_flags, self._chunks = read, target_flags, chunks
        self._warned = set[str]()  # The values that it has warned of.

    def divide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, unsplit: bool = False
    ) -> tuple[Division, Division | None]:
        """The arguments, and the target if there is one; ``unsplit``: as a single microbatch."""
        root, chunks = self.read(*args, **kwargs), 1 if unsplit else self._chunks
        size = find_size(root, chunks)
        decide(root, size)
        whole = [x for x in root.leaves if x.flag is None and x.dim is None and not x.single]
        if not all([isinstance(x.value, SHARED) or callable(x.value) for x in whole]):
            chunks = 1  # Microbatches can't share an object that may be a cache: all would write to it.
        rows = chunk_rows(size.rows, chunks)
        if len(rows) > 1 and any([isinstance(x.value, Tensor) for x in whole]):
            warn_of_whole(root, size.rows, size.shown_by, self._warned)
        input = divide(root, rows, size.shown_by)
        return input, None if target is None else divide_target(target, self.target_flags, rows)


def divide_target(target: Any, flags: Any, rows: Sequence[int]) -> Division:
    """The division of a target into the microbatches of an input."""
    root, size = read_input(target, flags, "the target"), BatchSize(sum(rows), "the input", len(rows) > 1, True)
    decide(root, size)
    for node in root.leaves:
        array = not isinstance(node.value, Tensor) and hasattr(node.value, "__array__")
        if array and node.flag is not False and not node.single and node.value.shape[:1] == (size.rows,):
            raise TypeError(f"{node.where} is a {type(node.value).__name__}: expected a tensor (torch.as_tensor()).")
    return divide(root, rows, size.shown_by)


def read_input(input: Any, flags: Any, whose: str = "the input") -> Node:
    """The node of a value: if it is a tuple, of several inputs, which isn't a list with one entry per row."""
    root = read(input, flags, whose, record=type(input) is tuple and flags not in (ROWS, GROUPS))
    verify_open([leaf.value for leaf in root.leaves if leaf.flag is not False], whose, deep=True)
    return root


def read(value: Any, flag: Any, where: str, record: bool = False) -> Node:
    """The node of a value; ``record``: not a list with one entry per row. Raises for a flag that doesn't match it."""
    nested = isinstance(flag, NESTED)
    listed = type(value) in (list, tuple) and not record and not nested
    level = None if isinstance(value, PackedSequence) else open_level(value)
    if flag == ROWS and not listed or nested and level is None and value is not None:
        raise misfit(where, flag, value)
    if level is None:
        return Node(value, None if nested else flag, where)  # An optional value may be left out.
    flags = [None if listed and flag in (ROWS, GROUPS) else flag] * len(level.parts)
    if nested:
        flags = flags_inside(flag, value, level, where)
    children = [read(x, inner, f"{where}[{key!r}]") for key, x, inner in zip(level.keys, level.parts, flags)]
    return Node(value, flag, where, children, level.rebuild, listed)


class BatchSize(NamedTuple):
    """The rows of a call, the value that has shown them, and whether there may be several microbatches."""

    rows: int
    shown_by: str
    several: bool
    exact: bool = False  #: Of a target: whether all tensors have to have these rows.


def find_size(root: Node, chunks: int) -> BatchSize:
    """The rows of a batch. Raises a ValueError if a list has two readings, and there may be several microbatches."""
    items = shown(root)
    if not items:
        raise TypeError(
            f"{root.where} holds no tensor with a first dimension to split into microbatches: expected a "
            "tensor, or a nesting of containers with one in it, that batched= doesn't mark False; or split=."
        )
    (first, sizes), *others = items
    # Another value decides if only one of the sizes matches it.
    matching = [[size for size in sizes if size in other] for _, other in others]
    decided = {each[0] for each in matching if len(each) == 1}
    if len(decided) == 1:
        sizes = [*decided]
    several = min(sizes[0], chunks) > 1
    if several and len(sizes) > 1:
        one, other = f"{sizes[0]} rows, one entry each", f"a batch of {sizes[1]} rows"
        raise two_readings(first, one, other, ROWS, 0)
    return BatchSize(sizes[0], first.where, several)


def shown(node: Node) -> list[tuple[Node, list[int]]]:
    """The tensors and lists that may show the number of rows, and these; first what is named, and has tensors."""
    x, flag = node.value, node.flag
    if flag is False or flag == GROUPS:
        return []
    if flag == ROWS:
        return [(node, [len(x)])]
    if isinstance(x, Tensor) and x.dim():
        return [(node, [x.size(flag if type(flag) is int else 0)])]
    if node.listed and (flag is None or flag is True) and alike(x) and not isinstance(x[0], (int, float)):
        inner = {tensor.size(0) for tensor in node.tensors}
        return [(node, [*dict.fromkeys([len(x), *(inner if len(inner) == 1 else ())])])]
    items = [item for child in node.children or () for item in shown(child)]
    return sorted(items, key=lambda item: (item[0].flag is None, not item[0].tensors))


def decide(node: Node, batch: BatchSize) -> None:
    """Notes in the nodes how they are split. Raises a ValueError for a wrong size, or one with two readings."""
    x, flag = node.value, node.flag
    if isinstance(x, Tensor) and x.dim() and flag is not False:  # One without dimensions is always whole.
        dim = flag if type(flag) is int else 0
        node.times = entries_per_row(node, x.size(dim), batch)
        node.dim = dim % x.dim() if node.times else None
    elif node.listed and (flag is None or flag is True or flag in (ROWS, GROUPS)):
        node.times = entries_per_row(node, len(x), batch)
        for leaf in node.leaves if node.times else ():
            leaf.single = True
    for child in () if node.times else node.children or ():
        decide(child, batch)


def entries_per_row(node: Node, size: int, batch: BatchSize) -> int:
    """How many of the ``size`` entries of a tensor or list each row has; 0 if it is whole, or split inside."""
    rows, flag, x, listed = batch.rows, node.flag, node.value, node.listed
    times = size // rows if rows and size % rows == 0 else int(size == rows)
    if flag in (ROWS, GROUPS) or not listed and (flag is not None or batch.exact):
        if not times or times > 1 and flag != GROUPS:
            raise wrong_size(node, size, rows, batch.shown_by)
        return times
    # A list of tensors that have the batch each is split inside, unless it has as many entries, too.
    inner = listed and {tensor.size(0) for tensor in node.tensors} == {rows}
    if listed and (inner and size != rows or not alike(x)):
        return 0
    if batch.several and inner:
        one, other = f"one entry for each of {rows} rows", f"tensors whose first dimension is the {rows} rows"
        raise two_readings(node, one, other, ROWS, 0)
    if batch.several and times > 1:
        one = f"{times} entries for each of the {rows} rows of {batch.shown_by}"
        raise two_readings(node, one, "one value for all rows", GROUPS, False)
    if batch.several and not times and not listed and x.dim() > 2 and size > 1 and x.size(1) == rows:
        raise two_readings(node, f"the {rows} rows of {batch.shown_by} along dimension 1", "no rows", 1, False)
    return int(times == 1 and not inner)


def chunk_rows(size: int, chunks: int) -> list[int]:
    """The rows of each microbatch: at most ``chunks``, none of which is empty unless the batch is."""
    step = max(1, -(-size // chunks))
    return [min(step, size - start) for start in range(0, size, step)] or [0]


@dataclass(frozen=True, eq=False)
class Division:
    """Flat values, and the part of them that each microbatch gets."""

    leaves: list[Any]
    dims: list[int | None]  #: The dimension along which each leaf is split; None: it isn't.
    sizes: list[list[int]]  #: Those of its parts along that dimension: there may be several entries per row.
    rows: Sequence[int]  #: The number of rows of each microbatch.
    places: list[list[int]]  #: The indices of each one's leaves: all, but for lists that are split between entries.
    nestings: list[Nesting]  #: That of each one's leaves.
    common_places: frozenset[int]  #: The indices of leaves that all microbatches have, or have a part of.
    shared_places: frozenset[int]  #: Those of tensors with dimensions that several microbatches share.
    batch: str = ""  #: The value that has shown the rows.
    root: Node | None = None  #: Says how leaves are split, unless a function of the user has.

    def scatter(self) -> list[tuple[list[Any], Nesting]]:
        """The leaves of each microbatch, and their nesting. A tensor that is given twice stays one."""
        found, known, count = list[Sequence[Any]](), dict[Any, Sequence[Any]](), len(self.rows)
        for k, (leaf, dim) in enumerate(zip(self.leaves, self.dims)):
            single = k not in self.common_places  # An entry of a list, which one microbatch has.
            key: Any = k if single or getattr(leaf, "requires_grad", False) else (id(leaf), dim)
            if dim is not None and key not in known:
                known[key] = pieces(leaf, self.sizes[k], dim)
            elif key not in known:
                known[key] = copies(leaf, 1) * count if single else copies(leaf, count)
            found.append(known[key])
        return [([found[k][i] for k in own], self.nestings[i]) for i, own in enumerate(self.places)]

    def gradient(self, k: int, parts: Sequence[Tensor | None]) -> Tensor:
        """The gradient of a leaf, from those of its microbatches, of which some have one."""
        x, dim, found = self.leaves[k], self.dims[k], [part for part in parts if part is not None]
        if dim is None:
            # The layer may have passed a single one to others too: it must be a separate tensor.
            return reduce(torch.add, found) if len(found) > 1 else found[0].clone()
        return torch.cat([
            x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :])) if part is None else part
            for part, size in zip(parts, self.sizes[k])
        ], dim)

    def some(self, count: int) -> Any:
        """The value for the first rows."""
        root: Any = self.root
        count = min(count, sum(self.rows))
        return unflatten(*divide(root, [count, sum(self.rows) - count], self.batch).scatter()[0])

    def described(self) -> list[str]:
        """How each value was treated, in lines; none for a single microbatch, or one of ``split=``."""
        return [] if self.root is None or len(self.rows) < 2 else treated(self.root, self.rows, self.batch)


def divide(root: Node, rows: Sequence[int], batch: str) -> Division:
    """The division of a value whose nodes say how it is split; ``batch`` has shown the number of rows."""
    leaves, parts = root.leaves, [root.part(stop - count, count) for count, stop in zip(rows, accumulate(rows))]
    common = frozenset([k for k, leaf in enumerate(leaves) if not leaf.single or len(rows) == 1])
    counts = Counter([id(leaf.value) for own, _ in parts for leaf in own])
    shared = [k for k, x in enumerate(leaves) if x.dim is None and x.tensors and counts[id(x.value)] > 1]
    numbers = {id(leaf): k for k, leaf in enumerate(leaves)}
    places = [[numbers[id(leaf)] for leaf in own] for own, _ in parts]
    sizes = [[count * leaf.times for count in rows] for leaf in leaves]
    return Division(
        [leaf.value for leaf in leaves], [leaf.dim for leaf in leaves], sizes, rows, places,
        [nesting for _, nesting in parts], common, frozenset(shared), batch, root,
    )


def move(division: Division, devices: Sequence[torch.device], unread: list[torch.Event]) -> Division:
    """The values on these devices: tensors on none of them are moved to the first one, as by ``x.to(device)``.

    The copies belong to the caller: they are made on its streams, for which the stages wait, and in its graph, which
    returns gradients to the tensors' devices. For a copy from the CPU, the host waits. If the memory is pinned, it
    waits for an event that is added to ``unread``, but only at the end of the call: a training loop may refill that
    memory as soon as the call has returned.
    """
    cpu, device, tensors = torch.device("cpu"), devices[0], [x for x in division.leaves if isinstance(x, Tensor)]
    # Next to tensors elsewhere, a tensor on the CPU may belong there, such as lengths of sequences.
    known = {*devices, cpu} if any([x.device != cpu for x in tensors]) else {*devices}
    found, pinned = dict[int, Tensor](), False
    for x in {id(x): x for x in tensors if x.device not in known}.values():
        pins = x.device == cpu and is_plain(x) and x.is_pinned()
        found[id(x)] = x.to(device, non_blocking=pins or "cpu" not in (x.device.type, device.type))
        pinned = pinned or pins
    if pinned and (event := stream.mark(stream.current(device))) is not None:
        unread.append(event)
    return replace(division, leaves=[found.get(id(x), x) for x in division.leaves]) if found else division


def copies(leaf: Any, number: int) -> list[Any]:
    """A value for each microbatch, which gets it whole."""
    if not isinstance(leaf, Tensor):
        return [leaf] * number
    if not leaf.dim() or leaf.is_inference():
        # Each microbatch gets a separate tensor: in place, m of them would write to the same memory. Where they do
        # share it, writes are found by its version, which an inference tensor doesn't have.
        return [leaf.clone() for _ in range(number)]
    tracked = leaf.requires_grad and torch.is_grad_enabled()
    return [leaf.view_as(leaf) if tracked else leaf.detach() for _ in range(number)]


def pieces(leaf: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """A part of a tensor for each microbatch, split along a dimension.

    To autograd, parts aren't views: of several views, none may be written to in place. The first one without a graph
    shares the version counter of the batch, so that autograd notices a later write to the batch. Others have separate
    ones: a write to one microbatch doesn't invalidate what autograd saved of the others. Along later dimensions, parts
    of contiguous memory are copies, on which ``view`` works, and which cuDNN accepts as states of an RNN.
    """
    # "Unsafe" is torch's word: the parts share memory, but not a version counter.
    parts = [*torch.unsafe_split_with_sizes(leaf, sizes, dim)]
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        parts[0] = leaf.detach().narrow(dim, 0, sizes[0]).detach()
    return [part.contiguous() for part in parts] if dim and leaf.is_contiguous() else parts
