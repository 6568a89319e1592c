"""One scheduled pass: the workers walk their rows, and the loss hands over the gradients that they have computed.

    executor (rows) ──> passes (F, B, W) ──> capture (autograd, no leaf is touched) ──> deferral.sums
    deferral.sums ──> harvest (collected) ──> release (loss.backward() gives them to the parameters)

The split engine adds weight gradients to the same sums from deferral.ledger, in W.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitpipe.batchnorm import numbered
from splitpipe.core import microbatch, stream
from splitpipe.core.thread_state import outside
from splitpipe.core.transfer import brought
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.ledger import Ledger
from splitpipe.deferral.streams import Lane
from splitpipe.schedule.op import Schedule
from splitpipe.skip.box import Key
from splitpipe.skip.skippable import pops, stashes
from splitpipe.stage.call import Setting
from splitpipe.stage.resources import Named, Resources
from splitpipe.training import harvest
from splitpipe.training.exchange import Post
from splitpipe.training.executor import Run
from splitpipe.training.gradients import Capture, ParkedHooks
from splitpipe.training.harvest import Sheaf
from splitpipe.training.loss import TARGET, Objective, Reduction
from splitpipe.training.ops import Common, Passes
from splitpipe.training.record import Recorder, memory
from splitpipe.training.release import loss, release
from splitpipe.training.rows import OpRun, rows_of


class Plan(NamedTuple):
    """What is done in one pass.

    Attributes:
        steps: of each worker.
        fused: microbatches whose backward passes are BW, of each stage.
    """

    steps: list[list[OpRun]]
    fused: list[set[int]]


@dataclass
class Trainer:
    """Runs a schedule on a model's resources.

    Args:
        resources: of the model.
        schedule: to run.
        split: whether weight gradients are deferred to W; else B computes them.
    """

    resources: Resources
    schedule: Schedule
    split: bool
    recorder: Recorder | None = None
    _plans: dict[tuple[object, ...], Plan] = field(default_factory=dict)
    _hooks: ParkedHooks | None = None

    def train(
        self,
        layers: Sequence[Named],
        objective: Objective,
        target: Any,
        setting: Setting,
        scale: Tensor | None,
    ) -> Tensor:
        """The loss of the batch; its backward hands the gradients over.

        Args:
            layers: name and module of every layer.
            objective: the loss, as a layer.
            target: of the batch.
            setting: of the pass.
            scale: what gradients are scaled by meanwhile; None: 1.
        """
        pool = self.resources.pool(layers)
        # The user's hooks and modes see the ops of a single thread, in the same order every time.
        workers = [0] * len(self.resources.workers) if setting.state.observed else self.resources.workers
        parts = self.resources.cut(layers)
        parts[-1] = [*parts[-1], ("loss_fn", objective)]
        self.recover()
        self._hooks = hooks = ParkedHooks()
        try:
            one = _Pass(self, parts, workers, hooks, setting, target, scale)
            run = Run(
                one.passes, list(map(str, one.stages)), one.plan.steps, pool, one.post, one.around, hooks.put_back
            )
            run.run(setting.variables)
            found = one.finish()
        finally:
            self.recover()
        if one.reels is not None and self.recorder is not None:
            self.recorder.end(one.reels)
        return found

    def recover(self) -> None:
        """Puts hooks back that the last pass has parked, if an interrupt has kept it from that."""
        hooks = self._hooks
        if hooks is not None:
            try:
                hooks.put_back()
            except BaseException:  # An interrupt: once more, and then it may go on.
                hooks.put_back()
                raise
            self._hooks = None

    def plan(self, workers: Sequence[int], microbatches: int, backward: bool) -> Plan:
        """The plan for a batch of so many microbatches, made once."""
        key = (*workers, microbatches, backward)
        if key not in self._plans:
            rows = [0] * self.schedule.devices
            for stage, device in enumerate(self.schedule.placement):
                rows[device] = workers[stage]
            steps = rows_of(self.schedule, rows, microbatches, backward)
            fused: list[set[int]] = [set() for _ in workers]
            for step in (step for row in steps for step in row if step.kind == "BW"):
                fused[step.stage].update(step.microbatches)
            self._plans[key] = Plan(steps, fused)
        return self._plans[key]


class _Pass:
    """One pass of one batch, put together."""

    def __init__(
        self,
        trainer: Trainer,
        parts: list[Sequence[Named]],
        workers: Sequence[int],
        hooks: ParkedHooks,
        setting: Setting,
        target: Any,
        scale: Tensor | None,
    ) -> None:
        self._trainer = trainer
        self._sums = [Sums() for _ in parts]
        self._parameters = [[list(layer.parameters()) for _, layer in part] for part in parts]
        self._setting = setting
        resources, state, count = trainer.resources, setting.state, len(parts)
        self.plan = trainer.plan(workers, len(setting.rows), state.grad)
        self.around = outside(state)
        self._computes = resources.computes()
        inputs = setting.begin_apart(self._computes)
        self._target, spec = _target(target, setting, resources.places[-1].device)
        targets = setting.cut_apart(self._target, spec, count - 1)

        self._reduction = Reduction([rows for _, rows in setting.rows], scale)
        devices = [place.device for place in resources.places]
        self.post = Post(workers, devices, self._computes, resources.stream)
        popped, stashed = _skips(parts)
        common = Common(
            post=self.post,
            popped={**popped, TARGET: count - 1},
            stashed=stashed,
            reduction=self._reduction,
            state=state,
            around=self.around,
            variables=[numbered(setting.variables.copy(), i) for i in range(len(inputs))],
            seeds=setting.seeds,
            stop=setting.stop,
            batch=setting.batch,
            last=count - 1,
        )
        names = [f"stage {stage} ({place})" for stage, place in enumerate(resources.places)]
        captures = [
            Capture(name, chain.from_iterable(own), sums, hooks)
            for name, own, sums in zip(names, self._parameters, self._sums)
        ]
        ledgers = self._ledgers(captures)
        self.stages = resources.stages(parts, self._computes, ledgers, setting.stop > 0)
        self.reels = None
        if trainer.recorder is not None and state.grad:
            self.reels = trainer.recorder.begin(self._computes, self._living)
        self.passes = [
            Passes(stage, ledger, capture, common, None if self.reels is None else self.reels[stage.index])
            for stage, ledger, capture in zip(self.stages, ledgers, captures)
        ]
        for i, (value, aim) in enumerate(zip(inputs, targets)):
            self.post.bring(0, ("F", i, 0), value)
            self.post.bring(count - 1, (TARGET, i), aim)

    def _living(self) -> set[int]:
        """Storages that no microbatch brings along."""
        tensors = [tensor for stage in self.stages for _, layer in stage.layers
                   for tensor in (*layer.parameters(), *layer.buffers())]
        batch = filter(torch.is_tensor, (*self._setting.leaves, *self._target))
        return {memory(tensor) for tensor in (*tensors, *batch)}

    def _ledgers(self, captures: Sequence[Capture]) -> list[Ledger | None]:
        if not self._trainer.split or not self._setting.state.grad:
            return [None] * len(captures)
        places = self._trainer.resources.places
        return [
            Ledger(sums, Lane(place.device, compute, None), own, capture.onward)
            for sums, place, compute, own, capture in zip(
                self._sums, places, self._computes, self.plan.fused, captures
            )
        ]

    def finish(self) -> Tensor:
        """The loss, with what it releases."""
        setting = self._setting
        with stream.use(self._computes[-1]):
            value, unit = self._reduction.result()
        value, unit = setting.handed_back([value, unit])
        result: Tensor = value
        differentiable = self.passes[-1].differentiable
        given: list[Sheaf] = []
        inside: list[Sheaf] = []
        if differentiable:
            with torch.no_grad():
                given, inside = self._given(), harvest.inside(self._parameters, self._sums, self._computes)
        setting.rejoin()
        # A gradient is released on the stream that goes on with it: the caller's own, or the stage's.
        phonies = [
            release(sheaf.totals, sheaf.reals, result.dtype, sheaf.reals[0].device) for sheaf in given if sheaf.totals
        ]
        for sheaf in inside:
            with stream.use(self._computes[sheaf.stage]):
                phonies.append(release(sheaf.totals, sheaf.reals, result.dtype, sheaf.reals[0].device))
        if differentiable:
            result = loss(result, unit, phonies)
        if not setting.end():
            self._trainer.resources.forget_rng_modes()
        return result

    def _given(self) -> list[Sheaf]:
        """The gradients of what the caller gave, and has on streams of its own."""
        setting, last = self._setting, len(self.passes) - 1
        found = []
        for stage, key, leaves in (0, None, setting.leaves), (last, TARGET, self._target):
            with stream.use(self._computes[stage]):
                grads = [self.passes[stage].given[key, i] for i in range(len(setting.rows))]
                pairs = harvest.given(leaves, setting.rows, grads, setting.whole if key is None else ())
                values = setting.handed_back([value for _, value in pairs], stage)
            found.append(Sheaf(stage, [Total.of(value) for value in values], [real for real, _ in pairs]))
        return found


def _target(target: Any, setting: Setting, device: torch.device) -> tuple[list[Any], Any]:
    leaves, spec = microbatch.flatten(target, "the target", batch=True)
    microbatch.verify_strided(leaves, "the target")
    microbatch.verify_filled(leaves, "the target")
    rows = sum(count for _, count in setting.rows)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if any(size != rows for size in sizes):
        raise ValueError(
            f"the target's tensors have first dimensions {sizes}, the input's {rows}: expected the same, since both "
            "are cut into microbatches along it. Reshape the target (y.view(len(x), -1)), and flatten it in loss_fn."
        )
    return [brought(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _skips(parts: Sequence[Sequence[Named]]) -> tuple[dict[Key, int], dict[Key, int]]:
    """The stage that pops, and the one that stashes each skip that goes from one stage to another."""
    popped = {key: stage for stage, part in enumerate(parts) for _, layer in part for key in pops(layer)}
    stashed = {key: stage for stage, part in enumerate(parts) for _, layer in part for key in stashes(layer)}
    far = {key for key in popped if stashed.get(key) != popped[key]}
    return {key: popped[key] for key in far}, {key: stashed[key] for key in far if key in stashed}
