"""Stand-ins with which compiled code computes instead of its weights, so that its backward can leave gradients to W.

    weights <── StandIns <── compiled code      its backward leaves the arguments of its second half here, and returns
                                                no gradient, except for an output which is a view of a weight
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from splitpipe.core.torch_private import peek_interpreter_stack
from splitpipe.deferral.function import WeightGradients, caller_here
from splitpipe.deferral.pending import Node


class StandIns(Node):
    """Tensors with the memory of weights."""

    @staticmethod
    def forward(ctx: Any, function: WeightGradients, *weights: Tensor) -> tuple[Tensor, ...]:
        """Takes the second half of the code's backward, and the weights."""
        ctx.set_materialize_grads(False)
        #: What the code's backward has left; None: it must leave nothing.
        ctx.function, ctx.left = function, None
        return tuple([weight.detach() for weight in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads


_STAND_INS: Any = StandIns


def stand_ins(function: WeightGradients, weights: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The tensors with which a call of compiled code computes instead of its weights; None: the weights themselves."""
    if caller_here() is None or not torch.is_grad_enabled():
        return None
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None
    found: tuple[Tensor, ...] = StandIns.apply(function, *weights)
    return found


def left_in(node: Any, function: WeightGradients, leave: Callable[[], Any]) -> bool:
    """Leaves what a call of compiled code needs for W; returns False if W won't compute it.

    Args:
        node: that of the call, whose backward runs.
        function: the second half of its backward.
        leave: makes what that needs, as its ``ctx``.
    """
    for stands, _ in node.next_functions:
        if isinstance(stands, _STAND_INS._backward_cls) and stands.function is function and stands.left is not None:
            stands.left.append(leave())
            return True
    return False
