"""Release: the gradients that a pass has computed, handed over to autograd when the user goes backward.

    loss <── Loss <── phony ── Release ──> parameters of the last layer        one a layer, the last layer's first
                 <── phony ── Release ──> parameters of the first layer
                 <── phony ── Release ──> the input

All that was computed is linear in the gradient of the loss, so each gradient is scaled by it and is then the one that
autograd would have computed. Hooks, DistributedDataParallel, accumulation and autograd.grad see an ordinary backward.
Nothing is handed over if nobody goes backward.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe.core.dtensor import meshed
from splitpipe.core.torch_private import _get_current_graph_task_keep_graph
from splitpipe.core.transfer import brought
from splitpipe.deferral.accumulator import Total


class Share:
    """The gradients of some tensors, until they are released.

    Args:
        totals: a gradient of each, or None.
    """

    def __init__(self, totals: Sequence[Total]) -> None:
        self._totals: Sequence[Total] | None = totals

    def scaled(self, factor: Tensor, keep: bool) -> list[Tensor | None]:
        """The gradients, times a factor.

        Args:
            factor: a tensor of one element, on the gradients' device.
            keep: whether they may be asked for again. If not, they are scaled in place, and no longer held here.

        Raises:
            RuntimeError: they were released before.
        """
        totals = self._totals
        if totals is None:
            raise RuntimeError(
                "Trying to backward through the loss of a schedule a second time: its gradients were handed over by "
                "the first backward. Pass retain_graph=True to it."
            )
        if not keep:
            self._totals = None
        one = factor.device.type == "cpu" and factor.item() == 1
        return [total.value if one and not keep else total.scaled(factor, in_place=not keep) for total in totals]


class Release(Function):
    """A phony; in backward, the share's gradients."""

    @staticmethod
    def forward(ctx: Any, share: Share, dtype: torch.dtype, device: torch.device, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.share = share
        return torch.zeros((), dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, *ctx.share.scaled(grad, _get_current_graph_task_keep_graph())


class Loss(Function):
    """The loss; in backward, its gradient for every Release."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, unit: Tensor | None, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.unit = unit
        ctx.devices = [phony.device for phony in phonies]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was passed to the backward of a schedule's loss, whose gradients were computed "
                "inside the forward: expected a first derivative. For a second one, compute the loss from model(x)."
            )
        if grad is None:
            return None, None, *[None] * len(ctx.devices)
        if ctx.unit is not None:
            grad = grad * ctx.unit
        if meshed(grad):  # The loss was a DTensor (loss_parallel), which does not go with plain gradients.
            shared: Any = grad
            grad = shared.full_tensor()
        given = {device: brought(grad, device) for device in set(ctx.devices)}
        return None, None, *[given[device] for device in ctx.devices]


def release(totals: Sequence[Total], reals: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A phony whose backward hands over the gradients of some tensors.

    Args:
        totals: the gradients, one of each.
        reals: the tensors.
        dtype: of the loss.
        device: of the gradients.
    """
    phony: Tensor = Release.apply(Share(totals), dtype, device, *reals)
    return phony


def loss(value: Tensor, unit: Tensor | None, phonies: Sequence[Tensor]) -> Tensor:
    """The loss, with what it releases in backward.

    Args:
        value: of the loss.
        unit: what the gradients are to be multiplied with; None: 1.
        phonies: of the releases. None of them: the gradient of the loss goes nowhere.
    """
    phonies = phonies or [torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)]
    y: Tensor = Loss.apply(value, unit, *phonies)
    return y
