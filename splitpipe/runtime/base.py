"""What every pipelined module's calls have in common, on threads and streams of this process."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from splitpipe.batch.division import Division
from splitpipe.compiled.layers import Compiler
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.deferral.pending import PendingStore
from splitpipe.loss.reducing import NO_FUNCTION, Told
from splitpipe.loss.terms import Number, Unknown
from splitpipe.partition.homes import without_trace
from splitpipe.schedule.recording.recording import Recording
from splitpipe.segments.forward import DropinWork
from splitpipe.segments.parts import Flat
from splitpipe.segments.stages import Options, RunningStage
from splitpipe.stage.call import Call, begin
from splitpipe.stage.layers import AllLayers
from splitpipe.stage.resources import Resources
from splitpipe.training.engine import Engine, defers
from splitpipe.training.loss import Objective, begun
from splitpipe.training.step import Trainer

T = TypeVar("T")
S = TypeVar("S", bound=RunningStage)


class Runtime:
    """Runs one module, scheduled or drop-in: an nn.Sequential (``chain``), or any other module (``code``)."""

    def __init__(self, options: Options, spans: Sequence[tuple[int, int]] = ()) -> None:
        self.options = options
        schedule, places = options.schedule, options.places
        rows = range(len(places)) if schedule is None else schedule.placement
        self._resources = Resources(places, spans, rows)
        self._engine = Engine(self._resources, options.split, options.stash_limit, schedule)
        self._compiler = Compiler(options.compiling, defers(options.split, schedule))
        self._told = Told()
        self._objective: Objective | None = None

    def recording(self) -> AbstractContextManager[Recording]:
        """Records the steps of the block."""
        return self._engine.recording()

    def _call(
        self, input: Division, state: State, layers: AllLayers, training: bool, collects: bool, anywhere: bool = False
    ) -> Call:
        """A call; ``collects`` and ``anywhere``: see ``begin``."""
        uncheckpointed = self.options.uncheckpointed if training and state.grad else None
        computes, callers = self._resources.streams(layers)
        return begin(
            input, uncheckpointed, state, devices=self._resources.devices, computes=computes, callers=callers,
            collects=collects, anywhere=anywhere,
        )

    def _stages(self, call: Call, layers: AllLayers, stage: Callable[[int, PendingStore | None], S]) -> list[S]:
        """Drop-in: the stages, made by ``stage`` from their numbers and the stores of their pending gradients."""
        sinks = self._engine.sinks(call, layers.stages)
        stages = [stage(j, None if sink is None else sink.stashes) for j, sink in enumerate(sinks)]
        for each, sink in zip(stages, sinks):
            each.sink = sink
            if sink is not None:
                sink.note = each.note(done=False)
        return stages

    def _found(
        self, work: DropinWork, threads: Pool, during: AbstractContextManager[object]
    ) -> tuple[list[Flat], list[dict[int, Number | Unknown]]]:
        """Runs all microbatches; returns their flat outputs, and what numbers among these consist of."""
        with forgetting(threads, work.walks), during:
            work.run(threads, self._resources.workers)
            found = work.found()
        work.rejoin()
        return found

    def _trainer(self) -> Trainer:
        if callable(self.options.reduction):
            raise ValueError(NO_FUNCTION)
        assert self._engine.trainer is not None
        return self._engine.trainer

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


@contextmanager
def forgetting(threads: Pool, walks: Sequence[Any]) -> Iterator[None]:
    """Ensures that no microbatch's thread works afterwards, unless a second interrupt ends the wait for that."""
    try:
        yield
    finally:
        if not threads.left:
            for walk in walks:
                walk.forget()
