"""Stand-ins with which compiled code computes instead of its weights, so that its backward can leave gradients to W.

    weights <── StandIns <── compiled code      its backward leaves the arguments of its second half here, and returns
                                                no gradient, except for an output which is a view of a weight
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

#: Tells compiled layers whether their weight gradients may wait; bound around a stage's layers.
deferring: ContextVar[bool] = ContextVar("splitpipe.deferring", default=False)


class StandIns(Function):
    """Tensors with the memory of weights; ``leftovers``: of the code's backward; None: it must leave nothing."""

    @staticmethod
    def forward(ctx: Any, function: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.leftovers = function, None
        return tuple([weight.detach() for weight in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads


def stand_ins(function: Any, weights: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The tensors with which a call of compiled code computes instead of its weights; None: the weights themselves.

    ``function``: the second half of the code's backward, whose ``accumulate`` W calls.
    """
    if not deferring.get() or not torch.is_grad_enabled():
        return None
    tensors: tuple[Tensor, ...] = StandIns.apply(function, *weights)
    return tensors


def leave_for_weights(node: Any, function: Any, leave: Callable[[], Any]) -> bool:
    """Leaves what ``leave`` makes, W's ``ctx``, for the call whose backward, ``node``, runs; False: W won't."""
    for stands, _ in node.next_functions:
        if getattr(stands, "function", None) is function and stands.leftovers is not None:
            stands.leftovers.append(leave())
            return True
    return False
