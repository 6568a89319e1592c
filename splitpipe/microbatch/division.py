"""The values of a call, flattened: their moves to the stages that take them, and the part that each microbatch gets."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.note import add_note
from splitpipe.core.tensors import is_plain
from splitpipe.microbatch.rows import Node
from splitpipe.microbatch.tree import Nesting, flatten, unflatten


@dataclass(frozen=True, eq=False)
class Division:
    """Flat values, and the part of them that each microbatch gets."""

    leaves: list[Any]
    dims: list[int | None]  #: The dimension along which each leaf is split; None: it isn't.
    rows: Sequence[int]  #: The number of rows of each microbatch.
    places: list[list[int]]  #: The indices of each one's leaves: all, but for lists that are split between entries.
    nestings: list[Nesting]  #: That of each one's leaves.
    root: Node | None = None  #: Says how leaves are split, unless a function of the user has.
    batch: str = ""  #: The value that has shown the rows.

    @cached_property
    def common_places(self) -> frozenset[int]:
        """The indices of leaves that all microbatches have, or have a part of."""
        return frozenset.intersection(*map(frozenset, self.places))

    @cached_property
    def shared_places(self) -> frozenset[int]:
        """The indices of tensors with dimensions that several microbatches share."""
        counts = Counter(id(self.leaves[k]) for own in self.places for k in own)
        shared = [k for k, leaf in enumerate(self.leaves) if counts[id(leaf)] > 1 and self.dims[k] is None]
        return frozenset([k for k in shared if isinstance(self.leaves[k], Tensor) and self.leaves[k].dim()])

    def scatter(self) -> list[tuple[list[Any], Nesting]]:
        """The leaves of each microbatch, and their nesting. A tensor that is given twice stays one."""
        found, known, count = list[Sequence[Any]](), dict[Any, Sequence[Any]](), len(self.rows)
        for k, (leaf, dim) in enumerate(zip(self.leaves, self.dims)):
            single = k not in self.common_places  # An entry of a list, which one microbatch has.
            key: Any = k if single or getattr(leaf, "requires_grad", False) else (id(leaf), dim)
            if dim is not None and key not in known:
                known[key] = pieces(leaf, self._sizes(k), dim)
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
            for part, size in zip(parts, self._sizes(k))
        ], dim)

    def _sizes(self, k: int) -> list[int]:
        """The sizes of a leaf's parts along its dimension: there may be several entries per row."""
        dim: Any = self.dims[k]
        times = self.leaves[k].shape[dim] // max(1, sum(self.rows))
        return [count * times for count in self.rows]

    def some(self, count: int) -> Any:
        """The value for the first rows."""
        root: Any = self.root
        count = min(count, sum(self.rows))
        return unflatten(*divide(root, [count, sum(self.rows) - count], self.batch).scatter()[0])


def divide(root: Node, rows: Sequence[int], batch: str) -> Division:
    """The division of a value whose nodes say how it is split; ``batch`` has shown the number of rows."""
    leaves, parts = [*root.leaves()], [root.part(sum(rows[:i]), count) for i, count in enumerate(rows)]
    index = {leaf: k for k, leaf in enumerate(leaves)}
    places, nestings = [[index[leaf] for leaf in own] for own, _ in parts], [nesting for _, nesting in parts]
    return Division([x.value for x in leaves], [x.dim for x in leaves], rows, places, nestings, root, batch)


def collect(parts: Sequence[Any], rows: Sequence[int]) -> Division:
    """The division of values that are divided already, into parts with these rows."""
    flat = [flatten(part) for part in parts]
    leaves = [leaf for own, _ in flat for leaf in own]
    numbers = iter(range(len(leaves)))
    places = [[next(numbers) for _ in own] for own, _ in flat]
    return Division(leaves, [None] * len(leaves), rows, places, [nesting for _, nesting in flat])


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


def describe(division: Division | None) -> list[str]:
    """How each value of a call was treated, in lines; none for a single microbatch, or one of ``split=``."""
    if division is None or division.root is None or len(division.rows) < 2:
        return []
    rows, groups = division.rows, dict[str, list[str]]()
    for k, node in enumerate(division.root.leaves()):
        x, how = node.value, "whole" if k in division.common_places else "split between rows"
        if node.dim is not None:
            how = f"split along dimension {node.dim}" + f", {node.times} entries per row" * (node.times > 1)
        what = str(tuple(x.shape)) if isinstance(x, Tensor) else f"({type(x).__name__})"
        groups.setdefault(how, []).extend([f"{node.where} {what}"] * (x is not None))
    found = f"microbatches of {rows[0]} rows of {sum(rows)}, as {division.batch} has them"
    return [f"{found} (batched= or split= changes how they are split)"] + [
        f"{how}: {', '.join(each[:4])}{', ...' if len(each) > 4 else ''}" for how, each in groups.items() if each
    ]


@contextmanager
def noted(*divisions: Division | None) -> Iterator[None]:
    """Adds to what a microbatch raises how these values were divided."""
    try:
        yield
    except Exception as error:
        for lines in filter(None, map(describe, divisions)):
            add_note(error, "\n    ".join(lines))
        raise


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
