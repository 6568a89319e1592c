"""Release: collects the gradients that a call has computed, and hands them over to autograd in the user's backward.

    loss <── Loss <── phony ── Release ──> parameters of the last layer        one per layer, the last layer's first
                <── phony ── Release ──> parameters of the first layer
                <── phony ── Release ──> the input

All computed gradients are linear in the gradient of the loss: scaled by it, each is the one that autograd would have
computed. Hooks, DistributedDataParallel, accumulation and autograd.grad see an ordinary backward. Without a backward,
nothing is handed over.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe.batch.division import Division
from splitpipe.core import microbatch, stream
from splitpipe.core.dtensor import meshed
from splitpipe.core.stream import Stream
from splitpipe.core.torch_private import _get_current_graph_task_keep_graph
from splitpipe.core.transfer import brought
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.training.capture import Grads


class GradientGroup(NamedTuple):
    """Gradients of some tensors, computed on one stage's stream and released together."""

    stage: int
    totals: list[Total]
    tensors: list[Tensor]


def parameter_gradients(
    layers: Sequence[Sequence[Sequence[Tensor]]], sums: Sequence[Sums], computes: Sequence[Stream]
) -> list[GradientGroup]:
    """The gradients of parameters, by stage and layer, then of other leaves that the stages used."""
    _order_streams(computes)
    found: dict[int, list[tuple[int, Tensor, Total]]] = {}
    for stage, own in enumerate(sums):
        for leaf, total in own:
            found.setdefault(id(leaf), []).append((stage, leaf, total))
    groups = []
    for stage, parts in enumerate(layers):
        for parameters in parts:
            wanted = [parameter for parameter in parameters if id(parameter) in found]
            if wanted:
                totals = [_sum(found.pop(id(parameter)), stage, computes) for parameter in wanted]
                groups.append(GradientGroup(stage, totals, wanted))
    for rest in found.values():
        stage, leaf, _ = rest[0]
        groups.append(GradientGroup(stage, [_sum(rest, stage, computes)], [leaf]))
    return groups


def _order_streams(computes: Sequence[Stream]) -> None:
    """Makes streams of one device wait for each other: a parameter may have gradients from several."""
    different = {id(compute): compute for compute in computes if compute is not None}.values()
    for one in different:
        for other in different:
            if one.device == other.device:
                stream.wait(one, other)


def _sum(parts: Sequence[tuple[int, Tensor, Total]], stage: int, computes: Sequence[Stream]) -> Total:
    """The sum of several gradients, on a stage's stream."""
    (_, _, whole), *others = parts
    if others:
        with stream.use(computes[stage]):
            for _, _, other in others:
                whole.join(other)
    for at, _, total in parts:
        if not stream.same(computes[at], computes[stage]) and total.value is not None:
            stream.hold(total.value, computes[stage])
    return whole


def input_gradients(division: Division, grads: Sequence[Grads]) -> list[tuple[Tensor, Tensor]]:
    """The caller's tensors that require grad and have a gradient, each with its gradient for the whole batch.

    ``grads``: for each microbatch, those of its tensors that require grad, in order.
    """
    wanted = [k for k, leaf in enumerate(division.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    columns: dict[int, list[Tensor | None]] = {k: [None] * len(grads) for k in wanted}
    for i, found in enumerate(grads if wanted else ()):
        for k, grad in zip([k for k in division.having(i) if k in wanted], found):
            columns[k][i] = grad
    pairs = [
        (division.leaves[k], microbatch.gradient_of(division.leaves[k], division.rows, column, division.dims[k]))
        for k, column in columns.items()
    ]
    return [(leaf, grad) for leaf, grad in pairs if grad is not None]


class Release(Function):
    """A phony that depends on some tensors; its backward returns their gradients, times the gradient of the loss.

    They are scaled in place, unless the graph is retained, so that they may be needed again.
    """

    @staticmethod
    def forward(ctx: Any, totals: Sequence[Total], dtype: torch.dtype, device: torch.device, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.totals = totals
        return torch.zeros((), dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        totals, keep = ctx.totals, _get_current_graph_task_keep_graph()
        if totals is None:
            raise RuntimeError(
                "Trying to backward through the loss of a schedule a second time: the first backward handed its "
                "gradients over. Pass retain_graph=True to it."
            )
        if not keep:
            ctx.totals = None
        one = grad.device.type == "cpu" and grad.item() == 1
        found = [total.value if one and not keep else total.scaled(grad, in_place=not keep) for total in totals]
        return None, None, None, *found


class Loss(Function):
    """The loss; its backward passes its gradient to every Release."""

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
                "create_graph=True was passed to the backward of a schedule's loss, but its gradients were computed "
                "inside the forward: expected a first derivative. For a second one, compute the loss from model(x)."
            )
        if grad is None:
            return None, None, *[None] * len(ctx.devices)
        if ctx.unit is not None:
            grad = grad * ctx.unit
        if meshed(grad):  # The loss was a DTensor (loss_parallel), which doesn't mix with plain gradients.
            shared: Any = grad
            grad = shared.full_tensor()
        given = {device: brought(grad, device) for device in set(ctx.devices)}
        return None, None, *[given[device] for device in ctx.devices]


def release(totals: Sequence[Total], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A phony with the loss's dtype, whose backward hands over the gradients of some tensors."""
    phony: Tensor = Release.apply(totals, dtype, tensors[0].device, *tensors)
    return phony


def loss(value: Tensor, unit: Tensor | None, phonies: Sequence[Tensor]) -> Tensor:
    """The loss, which releases gradients in backward; they are multiplied by ``unit`` (None: 1)."""
    # Without a phony, the gradient of the loss isn't used.
    phonies = phonies or [torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)]
    y: Tensor = Loss.apply(value, unit, *phonies)
    return y
