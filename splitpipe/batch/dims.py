"""The dimension of the batch in outputs, shown by a run with another number of rows: the one that differs."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: For each leaf, the dimension of the batch, if it has one.
Batches = list[int | None]


def batches(leaves: list[Any], rows: int, others: list[Any], other_rows: int) -> Batches:
    """The dimension of the batch in each leaf, from two outputs for different numbers of rows."""
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


def coupled(shape: tuple[int, ...], rows: int) -> str:
    """The message for an output that compares rows with each other."""
    return (
        f"an output of a microbatch of {rows} rows has the shape {list(shape)}, and other rows give another one: its "
        "second dimension is the batch too, so each row is compared with all others, as in a contrastive loss. "
        "Microbatches don't see each other: expected outputs in which rows are independent. Return the features, "
        "and compute the rest from model(...); or use chunks=1."
    )


def only_dimension(leaf: Any, rows: int) -> int | None:
    """The dimension of a tensor that has as many elements as a microbatch has rows. Raises if several have."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return 0
    found = [dim for dim, size in enumerate(leaf.shape) if size == rows]
    if len(found) != 1:
        raise ValueError(
            f"an output of a microbatch of {rows} rows has the shape {list(leaf.shape)}, and a run with another number "
            f"of rows, which would show the dimension of the batch, wasn't possible: expected one dimension of {rows}."
            " Choose chunks= such that microbatches have another size, or move the batch to the first dimension."
        )
    return found[0]


def without_rows(shape: list[int]) -> str:
    """The message for an output that differs between microbatches but has no dimension of the batch."""
    return (
        f"an output of shape {shape} has no dimension of the batch, but differs between "
        "microbatches, so it can't be joined: expected a tensor with the batch as a dimension, or the same "
        "value for all rows. Leave it out, or return what it is computed from."
    )
