"""Scheduled: one call with the loss inside. All ops run, then the loss hands over the gradients in its backward.

    rows ──> F ... F, loss ──> B from the loss's terms ──> W ──> sums of each stage
    sums ──> start of the outer graph, scaled by the gradient of the loss ──> releases

All gradients are linear in that of the loss: scaled by it, each is the one that autograd would have computed. Hooks,
DistributedDataParallel, accumulation and autograd.grad see an ordinary backward. Without one, nothing is handed over.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitpipe.backward.outer_graph import Gradients, Groups, OuterGraph
from splitpipe.backward.weight_gradients import Total
from splitpipe.core import stream
from splitpipe.engine.rows import OpRows
from splitpipe.engine.step import StepRun
from splitpipe.loss.objective import TARGET, BatchLoss
from splitpipe.stage.call import Origin, hand
from splitpipe.stage.segment import RunningStage

#: The gradients of tensors, and the stage that has computed these, by the key of the group.
Sums = dict[Any, tuple[RunningStage, list[Total]]]


class ScheduledStep:
    """The loss of a step."""

    def __init__(self, step: StepRun, target: Any, scale: Tensor | None, batch_loss: BatchLoss) -> None:
        self._step, self._target, self.batch_loss, self._scale = step, target, batch_loss, scale
        self._tracked = False  #: Whether a part of the loss has a graph.
        step.scheduled = self

    def start_backward(self, i: int, part: Tensor, origin: Origin | None) -> None:
        """Gives B of a microbatch the gradient of its part, which has left the graph there. Called in its last F."""
        if origin is not None:
            self._tracked, (stage, number) = True, origin
            seed = torch.ones_like(part.detach())
            seed = seed if self._scale is None else seed * self._scale
            self._step.stages[stage].fwd_cache[i].arrived.append((number, seed, None))  # type: ignore[index]

    def run(self, rows: OpRows) -> Tensor:
        """Runs all ops; returns the loss, which hands the gradients over in backward."""
        step, call = self._step, self._step.call
        try:
            step.run_rows(rows)
        finally:
            step.hooks.restore()
        with stream.use(call.computes[-1]):
            loss, unit = self.batch_loss.result(self._scale)
        hand([loss, unit], call.computes[-1], call.callers[-1])
        sums: Sums = {}
        with torch.no_grad():
            for key, stage, division in (None, step.stages[0], call.input), (TARGET, step.stages[-1], self._target):
                with stream.use(stage.compute):
                    grads = step.gradients_of(key, division)
                sums[key] = stage, [Total(division.leaves[k], x) for k, x in grads.items()]
            if step.shared is not None:
                step.shared.bring_home()
            for stage in step.stages:
                sums[stage.index] = stage, [total for total in stage.store.sums.values() if total.value is not None]
        call.rejoin()
        if not self._tracked:
            return loss
        groups = {key: [total.weight for total in own] for key, (_, own) in sums.items()}
        graph = OuterGraph({stage.device for stage in step.stages}, partial(_scale, sums, unit))
        return graph.attach([loss], groups)[0]


def _scale(
    sums: Sums, unit: Tensor | None, grads: Mapping[int, Tensor], wanted: Groups, keep: bool
) -> Gradients:
    """The gradients, times that of the loss and ``unit`` (None: 1); in place, unless they are needed again."""
    if not grads:
        return {key: [None] * len(tensors) for key, tensors in wanted.items()}
    grad: Any = grads[0] if unit is None else grads[0] * unit
    if hasattr(grad, "full_tensor"):  # The loss was a DTensor (loss_parallel), which doesn't mix with plain gradients.
        grad = grad.full_tensor()
    factors = {device: grad.to(device) for device in {x.device for own in wanted.values() for x in own}}
    gradients: Gradients = {}
    for key in wanted:
        stage, own = sums[key]
        values: list[Any] = hand([total.value for total in own], stage.compute, stream.current(stage.device))
        each = [(x, factors[total.weight.device], total.owned and not keep) for x, total in zip(values, own)]
        gradients[key] = [x.mul_(factor) if in_place else x * factor for x, factor, in_place in each]
    return gradients
