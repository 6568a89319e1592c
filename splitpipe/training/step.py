"""One scheduled call: the workers run their rows, and the loss hands over the gradients that they have computed.

    executor (rows) ──> ops (F, B, W) ──> gradients (autograd, without touching leaves) ──> sums of each stage
    sums ──> release (parameters, layer by layer; loss.backward() gives them to the parameters)

With the split backward, W adds weight gradients from training.ledger to the same sums.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from splitpipe.batch.division import Division
from splitpipe.core import stream
from splitpipe.core.tensors import Address, memory_of
from splitpipe.core.thread_state import State, autocast_off
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.streams import BackwardStreams
from splitpipe.schedule.op import Schedule
from splitpipe.skip.box import Key
from splitpipe.stage.call import Call
from splitpipe.stage.layers import ModelLayers
from splitpipe.stage.resources import Resources
from splitpipe.training import release
from splitpipe.training.capture import Capture, Grads, ParkedHooks
from splitpipe.training.exchange import Exchange
from splitpipe.training.ledger import Ledger
from splitpipe.training.loss import TARGET, Reduction
from splitpipe.training.op_rows import Execution, OpRun, rows_of
from splitpipe.training.record import Recorder, StageTrace

#: Imported only where something is compiled.
_COMPILED = "torch._dynamo.compiled_autograd"


class Rows(NamedTuple):
    """The rows of all workers in a call, and for each stage the microbatches whose backward ops are BW."""

    workers: Sequence[int]
    runs: list[list[OpRun]]
    fused: list[set[int]]


@dataclass
class Trainer:
    """Runs a schedule on a model's resources. ``split`` leaves weight gradients to W; otherwise, B computes them."""

    resources: Resources
    schedule: Schedule
    split: bool
    recorder: Recorder | None = None
    hooks: ParkedHooks = field(default_factory=ParkedHooks)
    _rows: dict[tuple[object, ...], Rows] = field(default_factory=dict)

    def train(
        self, layers: ModelLayers, call: Call, target: Division, scale: Tensor | None, work: Work, in_turn: bool = False
    ) -> Tensor:
        """The loss of the batch; gradients are computed scaled by ``scale``, and handed over unscaled."""
        if call.state.grad and getattr(sys.modules.get(_COMPILED), "compiled_autograd_enabled", False):
            raise RuntimeError(
                "compiled autograd is enabled around a step of a schedule, but it traces one backward at a time, and "
                "the workers run backward concurrently: expected a step outside compiled autograd (without "
                "torch._dynamo.config.compiled_autograd), or SplitPipe(..., backward='autograd') without a schedule."
            )
        recorder = self.recorder  # Read once: another thread may begin or end a recording.
        # The user's hooks and modes see the ops in a single thread, in the same order every time.
        one = in_turn or call.state.observed
        workers = [0] * len(self.resources.workers) if one else self.resources.workers
        rows = self.rows(workers, len(call.rows), call.checkpointed if work.recomputes else 0, call.state.grad)
        # Each call has separate ones: after a second interrupt, the workers of an earlier call may still use theirs.
        self.hooks = ParkedHooks()
        try:
            step = _Step(self, layers, rows, recorder, call=call, target=target, scale=scale, work=work)
            step.run()
            found = step.finish()
        finally:
            self.recover()
        if recorder is not None and step.traces:
            recorder.end(step.traces)
        return found

    def recover(self) -> None:
        """Restores hooks that a call has parked, if an interrupt has prevented it from doing so."""
        try:
            self.hooks.put_back()
        except BaseException:  # An interrupt: restore them again, then raise it.
            self.hooks.put_back()
            raise

    def rows(self, workers: Sequence[int], microbatches: int, checkpointed: int, backward: bool) -> Rows:
        """The rows for a batch of ``microbatches``, the first ones checkpointed; cached."""
        key = (*workers, microbatches, checkpointed, backward)
        if key not in self._rows:
            row_workers = [0] * self.schedule.devices
            for stage, device in enumerate(self.schedule.placement):
                row_workers[device] = workers[stage]
            runs = rows_of(self.schedule, row_workers, microbatches, backward, checkpointed)
            fused: list[set[int]] = [set() for _ in workers]
            for run in (run for row in runs for run in row if run.kind == "BW"):
                fused[run.stage].update(run.microbatches)
            self._rows[key] = Rows(workers, runs, fused)
        return self._rows[key]


@dataclass(frozen=True, eq=False)
class Shared:
    """The data that the ops of all stages share in one call; ``around`` is the state that the workers are in."""

    call: Call
    exchange: Exchange
    reduction: Reduction
    around: State
    last: int


class Ops(Protocol):
    """The ops of a stage, and what they have found."""

    #: The gradients of the caller's values: for each microbatch, those of the input (key None) and the target.
    given: dict[tuple[Key | None, int], Grads]
    #: True if an output of the stage requires grad.
    differentiable: bool


class Work(Protocol):
    """The work behind the ops of a step."""

    #: Whether a stage is recomputed as a whole, before its gradients are there.
    recomputes: bool

    def ops(
        self, j: int, sums: Sums, ledger: Ledger | None, capture: Capture, shared: Shared, trace: StageTrace | None
    ) -> Ops:
        """The ops of a stage."""

    def start(self, target: Division) -> None:
        """Makes the microbatches, once all stages exist. The target is on the last stage's device."""

    def run(self, execution: Execution) -> None:
        """Runs all ops; raises the first error."""

    def bring_home(self, sums: Sequence[Sums]) -> None:
        """Adds the gradients of copies to those of the parameters, before they are handed over."""


class _Step:
    """One call: makes the ops of every stage, runs them, and makes the loss."""

    def __init__(
        self,
        trainer: Trainer,
        layers: ModelLayers,
        rows: Rows,
        recorder: Recorder | None,
        *,
        call: Call,
        target: Division,
        scale: Tensor | None,
        work: Work,
    ) -> None:
        resources, last = trainer.resources, len(layers.stages) - 1
        self._call = call
        self._layers = layers
        self._rows = rows
        self._resources = resources
        self._put_back = trainer.hooks.put_back
        self._target = call.moves.target(target, resources.devices[-1])
        self._around = autocast_off(call.state)
        routes, side_by_side = resources.routes(call.computes), max(rows.workers) > 0
        self._exchange = Exchange(call.computes, routes, side_by_side)
        self._reduction = Reduction([count for _, count in call.rows], scale)
        self._sums = [Sums() for _ in layers.stages]
        self.traces: list[StageTrace] = []
        if recorder is not None and call.state.grad:
            self.traces = recorder.begin(call.computes, self._living)
        shared = Shared(
            call, self._exchange, self._reduction, around=self._around, last=last
        )
        self._work = work
        self._ops: list[Ops] = []
        for j, sums in enumerate(self._sums):
            capture = Capture(layers.stages[j], trainer.hooks)
            ledger = None
            if trainer.split and call.state.grad:
                streams = BackwardStreams(resources.devices[j], call.computes[j], None)
                names = layers.stages[j].names
                splits = len(rows.fused[j]) < len(call.rows)
                views = partial(capture.backward_views, sums)
                ledger = Ledger(sums, streams, rows.fused[j], views, names, splits)
            self._ops.append(work.ops(j, sums, ledger, capture, shared, self.traces[j] if self.traces else None))
        work.start(self._target)

    def _living(self) -> set[Address]:
        """The storages that exist before the forward: those of the input, the target and the layers."""
        tensors = [leaf for leaf in (*self._call.leaves, *self._target.leaves) if isinstance(leaf, Tensor)]
        for stage in self._layers.stages:
            for _, layer in stage.layers:
                tensors += (*layer.parameters(), *layer.buffers())
        return {*memory_of(*tensors)}

    def run(self) -> None:
        """Runs all ops; the last thread restores the hooks of parameters."""
        self._work.run(Execution(self._rows.runs, self._around, self._put_back))

    def finish(self) -> Tensor:
        """The loss, which releases the gradients in backward."""
        call, phonies = self._call, []
        with stream.use(call.computes[-1]):
            value, unit = self._reduction.result()
        value, unit = call.handed_back([value, unit])
        result: Tensor = value
        differentiable = self._ops[-1].differentiable
        given: list[release.GradientGroup] = []
        inside: list[release.GradientGroup] = []
        if differentiable:
            with torch.no_grad():
                given = self._given()
                parameters = [stage.parameters for stage in self._layers.stages]
                self._work.bring_home(self._sums)
                inside = release.parameter_gradients(parameters, self._sums, call.computes)
        call.rejoin()
        # A gradient is released on the stream that uses it next: the caller's own, or the stage's.
        for group in given:
            phonies.append(release.release(group.totals, group.tensors, result.dtype))
        for group in inside:
            with stream.use(call.computes[group.stage]):
                phonies.append(release.release(group.totals, group.tensors, result.dtype))
        if differentiable:
            result = release.loss(result, unit, phonies)
        self._resources.settle_rng_modes(call.end())
        return result

    def _given(self) -> list[release.GradientGroup]:
        """The gradients of the caller's input and target, for the caller's streams."""
        call, last = self._call, len(self._ops) - 1
        found = []
        for stage, key, division in (0, None, call.input), (last, TARGET, self._target):
            with stream.use(call.computes[stage]):
                grads = [self._ops[stage].given[key, i] for i in range(len(call.rows))]
                pairs = release.input_gradients(division, grads)
                values = call.handed_back([value for _, value in pairs], stage)
            if pairs:
                totals = [Total.of(value) for value in values]
                found.append(release.GradientGroup(stage, totals, [leaf for leaf, _ in pairs]))
        return found
