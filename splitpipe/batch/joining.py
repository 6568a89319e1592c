"""Joins the outputs of an nn.Sequential's microbatches along the dimension of the batch, or row by row."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.batch.dims import Batches, batches, only_dimension, without_rows
from splitpipe.batch.division import Division
from splitpipe.batch.entries import Entries, ListReader, concatenated, has_list
from splitpipe.core import microbatch
from splitpipe.core.microbatch import Leaves
from splitpipe.core.torch_private import TreeSpec

Parts = list[tuple[Leaves, TreeSpec]]
Again = Callable[[int], tuple[Any] | None]
_OUTPUT = "the output of the last layer"


class Joiner:
    """Joins outputs; remembers which lists have one entry per row, and where outputs have the batch."""

    def __init__(self) -> None:
        self._lists = ListReader()
        self._known: dict[str, list[int | None]] = {}  # By the nesting of outputs and the kind of input.

    def joined(self, parts: Parts, input: Division, again: Again) -> Any:
        """The output of the batch; ``again`` returns that for another number of rows, or None if it can't be run."""
        rows = [count for _, count in input.rows]
        first = microbatch.unflatten(*parts[0])
        values = None
        several = len(rows) > 1 or any(isinstance(leaf, Tensor) and not leaf.dim() for leaf in parts[0][0])
        if several and has_list(first, rows[0]):
            values = [first, *(microbatch.unflatten(*part) for part in parts[1:])]
            parts = [microbatch.flatten(value, _OUTPUT) for value in self._lists.marked(values, rows, " ", again)]
        if len(rows) == 1 or not any(input.dims):
            return microbatch.gather(parts, join)
        shown = [leaf.dim() if isinstance(leaf, Tensor) else None for leaf in parts[0][0]]
        key = f"{parts[0][1]} {shown} {input.kind()}"
        dims = self._known.get(key)
        # On the CPU, comparing again takes no time; elsewhere, the host would wait.
        verify = dims is None or all(leaf.device.type == "cpu" for leaf in parts[0][0] if isinstance(leaf, Tensor))
        dims = list(self._dims(parts, values, rows, again)) if dims is None else dims
        found = iter(dims)
        whole = microbatch.gather(parts, lambda column: join(column, next(found), verify))
        self._known[key] = dims  # Only now: what can't be joined raises each time.
        return whole

    def _dims(self, parts: Parts, values: list[Any] | None, rows: Sequence[int], again: Again) -> Batches:
        """The dimension of the batch in each leaf of the output, if it isn't the input's first dimension."""
        leaves = parts[0][0]
        other = next((i for i, count in enumerate(rows) if count != rows[0]), None)
        if other is not None:
            return batches(leaves, rows[0], parts[other][0], rows[other])
        count = 1 if rows[0] > 1 else 2
        more = again(count) if sum(rows) >= count else None
        if more is None:
            return [only_dimension(leaf, rows[0]) for leaf in leaves]
        if values is not None:
            more = (self._lists.marked([*values, *more], [*rows, count], " ", again)[-1],)
        return batches(leaves, rows[0], microbatch.flatten(*more, _OUTPUT)[0], count)


def join(column: tuple[Any, ...], dim: int | None = 0, verify: bool = True) -> Any:
    """Joins the values of microbatches at one place; ``verify``: those without a batch dimension must be equal."""
    if isinstance(column[0], Entries):
        return concatenated(column)
    if dim is None and isinstance(column[0], Tensor) and column[0].dim():
        if verify and any(not torch.equal(x, column[0]) for x in column[1:]):
            raise ValueError(without_rows(list(column[0].shape)))
        return column[0]
    return microbatch.join(column, dim or 0)
