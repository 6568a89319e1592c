"""Which tensors are weights: parameters, and what is computed from parameters alone.

A parameter has one Flush a pass, for all microbatches together. Any other weight (a transposed one, a slice, that of
a parametrised layer) is a tensor of its own in every microbatch. Its Flush returns the gradient to the node that made
it, and autograd carries on from there: hooks of the tensor or of its node see what they would see without a pipeline.

What the stage's input has a part in is no weight: its gradient is waited for, and must not be deferred.
"""
from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from splitpipe.core.tensors import is_plain

#: How many nodes may lie between a computed weight and its leaves.
_FAR = 16


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
    return x is None or is_plain(x)


class Meshed:
    """What a split function is that takes DTensors, for input and weights alike."""


def meshed(*tensors: Tensor | None) -> bool:
    """Whether all tensors are DTensors: other processes have parts of them."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and all([x is None or type(x) is kind for x in tensors])
