"""Stand-ins for weights, so that the backward of a SplitFunction, or of compiled code, can leave their gradients to W.

    weights <── StandIns <── function      its backward leaves here what W needs, and returns no gradient, except for
                                           an output which is a view of a weight
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class StandIns(Function):
    """Tensors with the memory of the ``needed`` ones among a function's weights.

    ``leftovers``: a list while B runs through a node that a walk has found; None: nothing may be left.
    """

    @staticmethod
    def forward(ctx: Any, function: Any, needed: Sequence[bool], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.needed, ctx.leftovers = function, needed, None
        return tuple([weight.detach() for weight in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *grads


def stand_ins(function: Any, weights: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Stand-ins for weights that require grad, and the other ones. ``function``: W calls its ``accumulate``."""
    needed = [x is not None and x.requires_grad for x in weights]
    if not torch.is_grad_enabled() or not any(needed):
        return weights
    stands = iter(StandIns.apply(function, needed, *compress(weights, needed)))
    return [next(stands) if need else x for x, need in zip(weights, needed)]


def leftovers_of(node: Any, function: Any) -> list[tuple[Any, Tensor | None, int]] | None:
    """Where the backward of a call, ``node``, leaves what W needs; None: nowhere.

    That is ``ctx``, the output's gradient, and the version of both.
    """
    for stands, _ in node.next_functions:
        if getattr(stands, "leftovers", None) is not None and stands.function is function:
            return stands.leftovers  # type: ignore[no-any-return]
    return None
