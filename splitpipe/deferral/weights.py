"""Which tensors are weights: leaves, transposed views of leaves, and what is computed from leaves alone.

A leaf has one Flush a pass, for all microbatches together. So has a matrix that is used transposed: its gradient is
that of the view, transposed. Any other weight (of a parametrised layer, say) is a tensor of its own in every
microbatch; its Flush returns the gradient to the node that made it, and autograd carries on from there.

What the stage's input has a part in is no weight: its gradient is waited for, and must not be deferred.
"""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

#: How many nodes may lie between a computed weight and its leaves.
_FAR = 16

_TRANSPOSES = ("TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0", "NumpyTBackward0")


def source(weight: Tensor) -> Tensor | None:
    """The matrix that a weight is the transpose of, if it is a leaf and nobody watches the view."""
    base: Any = weight._base
    node: Any = weight.grad_fn
    if base is None or not base.is_leaf or weight.dim() != 2 or node is None or node.name() not in _TRANSPOSES:
        return None
    if weight.shape != base.shape[::-1] or weight.stride() != base.stride()[::-1] or weight.retains_grad:
        return None
    if weight._backward_hooks or getattr(node.next_functions[0][0], "variable", None) is not base:
        return None
    if type(base) is not Parameter or weight.storage_offset() != base.storage_offset():
        return None
    return base


def leaves(weight: Tensor, inputs: Collection[Any]) -> list[Tensor] | None:
    """The leaves that a weight is computed from; None if they are far, or something else has a part in it.

    Args:
        weight: a tensor with a node.
        inputs: nodes of the stage's inputs.
    """
    found: list[Tensor] = []
    seen = set()
    stack: list[Any] = [weight.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if type(leaf) is not Parameter:
                return None
            found.append(leaf)
            continue
        if node in inputs or isinstance(node, BackwardCFunction) or len(seen) > _FAR:
            return None
        stack.extend(following for following, _ in node.next_functions)
    return found


def plain(x: Tensor | None) -> bool:
    """Whether a tensor is an ordinary one: dense, of no subclass."""
    return x is None or type(x) in (Tensor, Parameter) and x.layout is torch.strided and not x.is_nested
