"""Reads the input of an nn.Sequential and the target of a loss, and divides them into microbatches."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from splitpipe.batch.division import Division, divide
from splitpipe.batch.reading import Memory, Reader, rows_of
from splitpipe.batch.tree import Node
from splitpipe.core import microbatch
from splitpipe.core.torch_private import tree_flatten

_LEAF = tree_flatten(None)[1]


def of_input(input: Any, flags: Any, chunks: int, memory: Memory) -> Division:
    """The division of an nn.Sequential's input. Raises the errors of the checks of a batch."""
    if type(input) is Tensor and input.dim() and (flags is None or flags is True):
        microbatch.verify_strided([input], "the input")
        return _one_tensor(input, microbatch.cuts(input.shape[0], chunks))
    # Several inputs are a tuple, which isn't taken for a list with one entry per row.
    root = Node(input, flags, "the input", 0, record=type(input) is tuple and flags != "rows")
    verify_known(root, "the input")
    size, dims, doubt = Reader([root], "the input", memory).read(strict=chunks > 1)
    rows = microbatch.cuts(size, chunks if doubt is None else 1)
    return divide(input, [root], dims, rows, lambda values: values[0])


def of_target(target: Any, flags: Any, input: Division, memory: Memory) -> Division:
    """The division of a target into the microbatches of an input."""
    rows = sum(count for _, count in input.rows)
    root = Node(target, flags, "the target", 0, record=type(target) is tuple and flags != "rows")
    verify_known(root, "the target")
    leaves = [leaf.value for leaf in root.leaves()]
    microbatch.verify_filled(leaves, "the target")

    def disagree(sizes: list[int], dims: list[int]) -> ValueError:
        where = f"first dimensions {sizes}" if not any(dims) else f"sizes {sizes} along dimensions {dims}"
        return ValueError(
            f"the target's tensors have {where}, the input's {rows}: expected the same, since both "
            "are split into microbatches along it. Reshape the target (y.view(len(x), -1)), and flatten it in loss_fn; "
            "or name the dimension, as in batched={'target': 1}."
        )

    along = {dim for dim in input.dims if dim}
    reader = Reader([root], "the target", memory, else_along=along.pop() if len(along) == 1 else 0, disagree=disagree)
    _, dims, _ = reader.read(rows, strict=len(input.rows) > 1)
    return divide(target, [root], dims, input.rows, lambda values: values[0])


def rows_of_part(part: Any, flags: Any) -> int:
    """The rows of a microbatch that the user has divided: those of the first tensor that batched= doesn't exclude."""
    root = Node(part, flags, "the input", 0, record=type(part) is tuple and flags != "rows")
    return rows_of([root])


def _one_tensor(x: Tensor, rows: microbatch.Rows) -> Division:
    """The same result as ``divide``, but faster."""
    def some(start: int, count: int) -> Tensor:
        return x.detach()[start : start + count].clone()

    return Division([x], _LEAF, [0], rows, some=some)


def verify_known(root: Node, whose: str) -> None:
    """Raises for containers with tensors that pytree doesn't know, unless batched= marks them as whole."""
    for leaf in root.leaves():
        if leaf.flag is not False:
            microbatch.verify_open(leaf.value, whose, deep=True)


