"""What every pipelined module's calls have in common, on threads and streams of this process."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from splitpipe.batch.division import Division
from splitpipe.compiled.layers import Compiler
from splitpipe.core import thread_state
from splitpipe.core.phase import is_checkpointing, is_recomputing
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool, ProcessLock
from splitpipe.deferral.accumulator import Sums
from splitpipe.deferral.pending import PendingStore
from splitpipe.deferral.stash import Stashes
from splitpipe.deferral.streams import BackwardStreams
from splitpipe.engine.dropin import DropinWork
from splitpipe.engine.parts import Flat
from splitpipe.loss.reducing import NO_FUNCTION, Told
from splitpipe.loss.terms import Number, Unknown
from splitpipe.partition.homes import without_trace
from splitpipe.runtime.options import Options
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.stage.call import Call, begin
from splitpipe.stage.checkpoint import is_checkpoint
from splitpipe.stage.layers import ModelLayers, StageLayers
from splitpipe.stage.resources import Resources
from splitpipe.training.capture import Capture, ParkedHooks
from splitpipe.training.loss import Objective, begun
from splitpipe.training.record import Recorder
from splitpipe.training.sink import DropinSink
from splitpipe.training.step import Trainer

T = TypeVar("T")


class Runtime:
    """Runs one module, scheduled or drop-in: an nn.Sequential (``chain``), or any other module (``code``)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        schedule, places = options.schedule, options.places
        rows = range(len(places)) if schedule is None else schedule.placement
        self._resources = Resources(places, rows)
        self._trainer = None if schedule is None else Trainer(self._resources, schedule, options.split)
        self._lock = ProcessLock()
        self._compiler = Compiler(options.compiling, defers(options.split, schedule))
        self._told = Told()
        self._objective: Objective | None = None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records the steps of the block."""
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError(
                "record() needs a model that runs backward itself: expected SplitPipe(..., schedule=..., "
                "loss_fn=criterion). With schedule='gpipe' and a loss_fn, loss = model(x, target=y) can be recorded."
            )
        if trainer.recorder is not None:
            raise RuntimeError("the model is already being recorded: expected one `with model.record()` at a time.")
        trainer.recorder = Recorder(trainer.schedule, self._resources.places)
        try:
            yield trainer.recorder.recording
        finally:
            recorder, trainer.recorder = trainer.recorder, None
            recorder.finish()

    def _guarded(self, state: State, call: Callable[[], T], alone: bool = False) -> T:
        """Raises for calls by the model's own layers; with a schedule, or ``alone``, runs one call at a time."""
        if self._resources.at_work_here():
            raise RuntimeError(
                "a SplitPipe was called by one of its layers, inside its own forward: expected layers that call "
                "other modules, since it would wait for itself. (If a layer differentiates in its forward, a "
                "checkpoint around the model calls it again: expected the model's own checkpoint='always' instead.)"
            )
        # The user's function modes see the layers' calls, which workers make, but not the pipeline's own.
        hidden = thread_state.function_modes(state.function_modes, ()) if state.function_modes else nullcontext()
        if self._trainer is None and not alone:
            with hidden:
                return call()
        with hidden, self._lock.lock:
            if self._trainer is not None:
                self._trainer.recover()  # This process may have been forked during another thread's step.
            return call()

    def _call(
        self, input: Division, state: State, layers: ModelLayers, training: bool, anywhere: bool = False
    ) -> Call:
        """A call; ``anywhere``: see ``begin``."""
        uncheckpointed = self.options.uncheckpointed if training and state.grad else None
        computes, callers = self._resources.streams(layers)
        return begin(
            input, uncheckpointed, state, devices=self._resources.devices, computes=computes, callers=callers,
            collects=layers.collects, doubts=self._resources.doubt, anywhere=anywhere,
        )

    def _stage(self, call: Call, layers: ModelLayers, j: int, pending: PendingStore | None) -> Any:
        """A stage of a call, given the store of its pending gradients."""
        raise NotImplementedError

    def _stages(self, call: Call, layers: ModelLayers) -> list[Any]:
        """Drop-in: the stages of a call."""
        if call.state.grad and layers.sharded:
            self._resources.verify_groups(layers)
        stages = []
        for j, sink in enumerate(self._sinks(call, layers.stages)):
            stage = self._stage(call, layers, j, None if sink is None else sink.stashes)
            stage.sink = sink
            if sink is not None:
                sink.note, sink.facts = stage.note(done=False), stage.facts
            stages.append(stage)
        return stages

    def _sinks(self, call: Call, stages: Sequence[Any]) -> list[DropinSink | None]:
        """Where the weight gradients of each stage's blocks go; None if all are left to autograd."""
        # A pipeline inside something that is recomputed must make the same nodes both times; and torch's checkpoint
        # would recompute for each backward that reaches what it has saved.
        inside = is_checkpointing() or is_recomputing() or is_checkpoint(call.state.hooks)
        # A user's modes see the functions that layers call, but not the pipeline's own.
        watched = call.state.observed or call.state.hooks_disabled is not None
        if not self.options.split or not call.state.grad or inside or watched:
            return [None] * len(self._resources.devices)
        found: list[DropinSink | None] = []
        for own, streams in zip(stages, self._streams(call)):
            found.append(DropinSink(own, Stashes(streams, self.options.stash_limit, own.names, partial(_views, own))))
        return found

    def _streams(self, call: Call) -> Iterator[BackwardStreams]:
        resources = self._resources
        sides = [None if resources.on_cpu else resources.named(device, "weights") for device in resources.devices]
        return map(BackwardStreams, resources.devices, call.computes, sides)

    def _found(
        self, work: DropinWork, threads: Pool, during: AbstractContextManager[object]
    ) -> tuple[list[Flat], list[dict[int, Number | Unknown]]]:
        """Runs all microbatches; returns their flat outputs, and what numbers among these consist of."""
        with forgetting(threads, work.forwards), during:
            work.run(threads, self._resources.workers)
            found = work.found()
        work.rejoin()
        return found

    def _step_trainer(self) -> Trainer:
        if callable(self.options.reduction):
            raise ValueError(NO_FUNCTION)
        assert self._trainer is not None
        return self._trainer

    def _scale(self, state: State, grad_scaler: Any) -> Tensor | None:
        """The scale of a gradient scaler, as a tensor; None without a scaler or a backward."""
        if not state.grad:
            return None
        if grad_scaler is not None and grad_scaler.is_enabled():
            scale: Tensor = grad_scaler.scale(torch.ones((), device=self._resources.devices[-1]))
            return scale
        if any(enabled and dtype is torch.float16 for _, enabled, dtype in state.autocast):
            raise RuntimeError(
                "the model was called under float16 autocast without a grad_scaler: a schedule runs backward inside "
                "the forward, before the loss is scaled, so small gradients would become 0. Expected "
                "SplitPipe(..., grad_scaler=scaler) with the loop's torch.amp.GradScaler, or bfloat16."
            )
        return None

    def _objective_of(self, loss_fn: Callable[..., Any]) -> Objective:
        self._objective = begun(self._objective, loss_fn, self.options.reduction, self._told)
        return self._objective

    def _tried(
        self, module: nn.Module, run: Callable[[], T], inside: AbstractContextManager[None] | None = None
    ) -> tuple[T] | None:
        """The result of a run on a few rows that leaves no trace; None if the module can't be run on that few."""
        try:
            with without_trace(module, self._resources.devices, hooks=False), inside or nullcontext():
                return (run(),)
        except torch.OutOfMemoryError:  # This says nothing about the module.
            raise
        except Exception as error:  # For example, it may need more rows.
            error.__traceback__ = None  # Its frames keep the run's tensors alive.
            return None


def _views(
    own: StageLayers, sums: Sums, roots: Sequence[GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
) -> None:
    hooks = ParkedHooks(threading.get_ident())
    try:
        Capture(own, hooks).backward_views(sums, roots, grads, leaves)
    finally:
        hooks.put_back()


def inner_state(state: State) -> State:
    """The state in which a scheduled step's layers run."""
    # A checkpoint around the call has nothing to keep, since tensors that layers save are used before it returns. To
    # get them back, its hooks would call the model again, during the model's own call.
    hooks = None if is_checkpoint(state.hooks) else state.hooks
    return state._replace(hooks=hooks)


def defers(split: bool, schedule: Schedule | None) -> bool:
    """True if weight gradients are ever computed separately from input gradients."""
    return split and (schedule is None or any(op.kind == "W" for row in schedule.rows for op in row))


@contextmanager
def forgetting(threads: Pool, forwards: Sequence[Any]) -> Iterator[None]:
    """Ensures that no microbatch's thread works afterwards, unless a second interrupt ends the wait for that."""
    try:
        yield
    finally:
        if not threads.left:
            for forward in forwards:
                forward.forget()
