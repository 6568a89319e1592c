"""The ops of a call, which its threads run on stages and microbatches.

    F    a forward's way through a stage
    R    the segment of a checkpointed microbatch is made again; it needs no gradient
    B    gradients that have arrived ──> autograd ──> gradients of what had entered, sent back to their origins
    W    what B left in the store ──> sums of weight gradients, after the gradients have left for the stages before

B of a stage runs after B of the same microbatch on all later stages: after that, no more gradients arrive.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from splitpipe.backward.split_backward import InputGradients, LeafHooks, backward_input
from splitpipe.core import stream
from splitpipe.core.note import add_note
from splitpipe.core.stream import Stream
from splitpipe.core.transfer import Route
from splitpipe.core.worker import LaunchLock, Pool
from splitpipe.engine.executor import Executor
from splitpipe.engine.record import Recorder, StageTrace
from splitpipe.engine.rows import OpRows, OpRun
from splitpipe.skip.tracker import Key
from splitpipe.stage.call import Call
from splitpipe.stage.segment import RunningStage, Segment


@dataclass(eq=False)
class StepRun:
    """The ops of a call; ``run`` and ``forward_all`` are what its threads do (see ``Executor``)."""

    call: Call
    stages: Sequence[RunningStage]
    pool: Pool | None  #: None: from now on, all ops run in the caller's thread (see ``core.thread_state``).
    workers: tuple[int, ...]  #: That of each stage.
    route: Callable[[int, int], Route | None]  #: That between two stages; None: nothing is copied.
    split: bool  #: Whether weight gradients may wait for W.
    drop_in: bool  #: Whether the caller's backward starts B: then the leaves of the stages' graphs must be known.
    hooks: LeafHooks  #: Where hooks of leaves are parked while B runs.
    recorder: Recorder | None = None
    traces: Sequence[StageTrace] = ()  #: Those of a recording: one per stage, or none.
    keep: bool = False  #: Whether graphs are needed again after B.
    wants_weights: bool = True  #: Whether B leaves anything for W.
    forwards: list[Any] = field(default_factory=list)  #: The microbatches: how each runs through the stages.
    #: The gradients of the caller's input (None) and target, for each leaf by microbatch.
    input_grads: dict[tuple[Key | None, int], dict[int, Tensor]] = field(default_factory=dict)
    #: Of a call with a schedule: gets the microbatches' parts of the loss.
    scheduled: Any = None
    launching: LaunchLock = field(default_factory=LaunchLock)

    def timed(self, stage: int) -> Callable[[Stream], None] | None:
        """What records the copies of a stage; None if nothing does."""
        return self.traces[stage].copied if self.traces else None

    def run_rows(self, rows: OpRows) -> None:
        """Runs rows of ops; raises the first error."""
        pool = None if self.pool is None or self.pool.has_this_thread() else self.pool  # It would wait for itself.
        forward_all = self.forward_all if pool is not None and self.forwards and self.forwards[0].own_forward else None
        try:
            Executor(rows, self.run, self.call.state.outside_forward(), self.call.variables, forward_all).run(pool)
        except BaseException:
            for stage in self.stages:  # What is freed now may still be being read or written.
                stage.store.clear()
                stream.wait(stream.current(stage.device), stage.compute)
            raise
        finally:
            self.forwards, self.scheduled = [], None  # They refer to this: the call is freed as soon as it is dropped.

    def forward_all(self, i: int, pause: Callable[[], None]) -> None:
        """F of all stages, for a forward that is one call; between two stages, it calls ``pause``."""
        def advance(j: int) -> None:
            self._end(OpRun("F", j, (i,)))
            self.launching.give()
            pause()
            self._begin(j + 1)

        self._begin(0)
        try:
            self.call.contexts[i].run(self.forwards[i].forward_all, advance)
            self._end(OpRun("F", len(self.stages) - 1, (i,)))
        finally:
            self.launching.give()

    def run(self, op: OpRun) -> None:
        """Runs an op on its stage's stream, in any thread."""
        kind, stage, i = op.kind, self.stages[op.stage], op.microbatches[0]
        if kind == "F" and self.forwards[i].own_forward:  # In the caller's thread: past all stages at once.
            if op.stage == 0:
                self.forward_all(i, lambda: None)
            return
        try:
            with stream.use(stage.compute):
                self._begin(op.stage)
                if kind == "F":
                    self.call.contexts[i].run(self.forwards[i].forward, op.stage)
                elif kind == "R" and (dropped := stage.fwd_cache[i]).recompute is not None:  # Else it is kept.
                    stage.store.finish()  # What W has read is let go of: R needs as much.
                    segment = dropped.recompute(self, stage)
                    segment.arrived = dropped.arrived  # Not a copy: a later stage may be adding to it.
                    stage.fwd_cache[i] = segment
                elif kind[0] == "B":
                    self._backward(stage, i)
                if kind[-1] == "W":
                    stage.store.backward_weight(op.microbatches)
                    stage.store.finish()
                self._end(op)
        except BaseException as error:
            if kind != "F":
                what = {"R": "recomputation", "W": "weight gradients"}.get(kind, "backward")
                add_note(error, f"in the {what} of {stage.name}, microbatch {i}")
            raise
        finally:
            self.launching.give()

    def _begin(self, stage: int) -> None:
        self.launching.take(self.stages[stage].compute)
        if self.traces:
            self.traces[stage].start()

    def _end(self, op: OpRun) -> None:
        if self.traces:
            self.traces[op.stage].end(op.kind, op.microbatches)

    def _backward(self, stage: RunningStage, i: int) -> None:
        """B, which sends gradients to where the values came from; and W of what waits, if that is too much."""
        segment = stage.fwd_cache[i]
        if not self.keep:
            del stage.fwd_cache[i]
        gradients = self.differentiate(stage, segment, self.keep)
        origins = segment.origins
        del segment
        messages: dict[int, list[tuple[int, Tensor]]] = {}  # One for each stage.
        for (source, number), grad in zip(origins, gradients.entries):
            if grad is None:
                continue
            if isinstance(source, int):
                messages.setdefault(source, []).append((number, grad))
            else:
                self.input_grads.setdefault((source, number), {})[i] = grad
        for source, pairs in messages.items():
            route, event = self.route(stage.index, source), None
            if route is not None:
                carried, event = route.carry([grad for _, grad in pairs], self.timed(stage.index))
                pairs = [(number, grad) for (number, _), grad in zip(pairs, carried)]
            self.stages[source].fwd_cache[i].arrived.extend([(number, grad, event) for number, grad in pairs])
        if self.wants_weights:
            stage.store.add(i, gradients)
            if stage.store.waiting > stage.store.limit:
                stage.store.backward_weight()

    def differentiate(self, stage: RunningStage, segment: Segment, keep: bool) -> InputGradients:
        """Runs backward from the gradients that have arrived at a segment's roots."""
        arrived, segment.arrived = segment.arrived, []
        for event in {id(event): event for _, _, event in arrived if event is not None}.values():
            stream.wait_for(stage.compute, event)
        roots, grads = [segment.roots[number] for number, _, _ in arrived], [grad for _, grad, _ in arrived]
        graph = segment.graph_for_backward()
        self.hooks.park(graph.leaves)
        self.launching.give()
        gradients = backward_input(roots, grads, segment.entries, graph, keep)
        self.launching.take(stage.compute)
        return gradients
