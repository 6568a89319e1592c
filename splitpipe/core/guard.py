"""The guard at a stage's inputs: the node through which values enter the graph of one microbatch on one stage.

    loss <── ... <── layers <── Guard <── (nothing)      B captures the gradients that arrive at its outputs

The guard itself never runs in B. If it does run, a gradient came on a path that the pipeline doesn't know, and the
stage before would lose it.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Guard(Function):
    """The tensors, as outputs of one node. That leads to a phony: it would hold the tensors as long as the graph is."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if any([grad is not None for grad in grads]):
            raise RuntimeError(
                "a gradient arrived at a stage's input on a path that the pipeline doesn't know, such as a loss "
                "that a layer keeps, and earlier stages would lose it. Expected every term of the loss in the model's "
                "output or in loss_fn(output, target), or, without a schedule, SplitPipe(..., backward='autograd')."
            )
        return None, *[None for _ in grads]


#: Without the check whether torch.func is active, which takes longer: no pipeline runs inside it.
_guard: Any = super(Function, Guard).apply


def guard(tensors: Sequence[Tensor]) -> list[Any]:
    """Tensors without a graph, as they enter one: they require grad."""
    return list(_guard(torch.empty(0, device="cpu", requires_grad=True), *tensors)) if tensors else []
