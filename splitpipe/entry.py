"""Where a value enters the graph of one (stage, microbatch), and where its gradient comes out of it.

    leaf ── Enter ──> value      backward: the gradient is put down here, and goes no further

A value enters as a node's output: a layer may write to it in place, as it may to any other's output.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from splitpipe.stage import Parcel

#: Of a parcel's leaves that require grad; None where there is none.
Grads = list[Tensor | None]


def enter(parcel: Parcel) -> tuple[Parcel, Grads]:
    """The parcel's values behind Enter, and where their gradients will be after backward.

    Args:
        parcel: of leaves.
    """
    numbers = parcel.differentiable
    grads: Grads = [None] * len(numbers)
    if not numbers:
        return parcel, grads
    leaves = list(parcel.leaves)
    for k, number in enumerate(numbers):
        leaves[number] = Enter.apply(leaves[number], grads, k)
    return parcel.holding(leaves), grads


class Enter(Function):
    """The tensor; in backward its gradient is put down."""

    #: Nothing in it fails.
    notes_itself = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, grads: Grads, number: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.grads, ctx.number = grads, number
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        ctx.grads[ctx.number] = grad
        return None, None, None


#: The class of Enter's nodes.
ENTER: type = Enter._backward_cls
