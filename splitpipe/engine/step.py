"""A step: the ops of a call on stages and microbatches, and the threads that run them.

    F    a forward's way through a stage
    R    the segment of a checkpointed microbatch is made again; it needs no gradient
    B    gradients that have arrived ──> autograd ──> gradients of what had entered, sent back to their origins
    W    what B left in the store ──> sums of weight gradients, after the gradients have left for the stages before

B of a stage runs after B of the same microbatch on all later stages: after that, no more gradients arrive.

    row of a worker   F0 F1 F2 B0 F3 B1 ...    the ops of a row in their order, one at a time
    row of another    F0 B0 F1 B1 ...

    a microbatch      F0 of stage 0 ── cut ── F0 of stage 1 ── ... ── end of the forward

If a forward is one call of the module's own code, its frames stay on its thread's stack between two stages, where the
thread waits for the next F. So each microbatch has a thread for its F, and each row one for its other ops.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from splitpipe.backward.split_backward import InputGradients, LeafHooks, backward_input
from splitpipe.core import stream, thread_state
from splitpipe.core.note import add_note
from splitpipe.core.stream import Stream
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import RemovableHandle
from splitpipe.core.transfer import Route
from splitpipe.core.worker import LaunchLock, Pool
from splitpipe.engine.record import Recorder, StageTrace
from splitpipe.engine.rows import OpRows, OpRun
from splitpipe.skip.tracker import Key
from splitpipe.stage.call import Call
from splitpipe.stage.segment import RunningStage, Segment
from splitpipe.stage.shared_parameters import SharedParameters


class Stopped(BaseException):
    """Raised where the call was stopped; the reason is raised elsewhere."""


class Executor:
    """The threads that run rows: ``do`` runs an op, in the state ``around`` and with context variables.

    ``parked``: the first F of a microbatch runs all of its F, and calls what it is given between two stages.

    Guarantees, and what would break them:

    * No thread waits for an op that never comes. Who ends an op hands out all that is ready then, or, if nothing is
      running any more, ends the call for all: both under one lock.
    * When ``run`` ends, no frame of a forward is left: one that must not continue has Stopped raised at its cut. After
      an error, ops that run are ended, and no other begins.
    """

    def __init__(
        self, rows: Sequence[Sequence[OpRun]], do: Callable[[OpRun, Callable[[], None]], None], around: State,
        variables: Context, parked: bool = False,
    ) -> None:
        ops, self._rows = [run for row in rows for run in row], [deque(row) for row in rows]
        self._do_op, self._around, self._variables, self._parked = do, around, variables, parked
        self._last, self._alone = max([run.stage for run in ops]), False
        self.size = len(rows) + (1 + max([i for run in ops for i in run.microbatches]) if parked else 0)
        self._queues: list[SimpleQueue[OpRun | None]] = [SimpleQueue() for _ in range(self.size)]
        self._lock = threading.Lock()
        self._at_work: dict[int, tuple[int, OpRun]] = {}  # By thread: the number of the row, and the op.
        self._ended: set[tuple[str, int, int]] = set()
        self._errors: list[BaseException] = []
        self._over = False

    def run(self, pool: Pool | None) -> None:
        """Does all ops; raises the first error. Without a pool, the caller's thread does one after another."""
        self._alone = pool is None
        self._hand_out()
        try:
            if pool is None:
                self._work(0)
            else:
                pool.run([partial(self._work, number) for number in range(self.size)], self._stop)
            if self._errors:
                raise self._errors.pop(0)
            if any(self._rows):
                raise RuntimeError("no op of the schedule's rows can run: expected rows without a deadlock.")
        finally:
            self._errors = []  # A traceback refers to this frame.

    def _work(self, number: int) -> None:
        """What a thread does, from start to end: ops, and forwards to their ends."""
        pause = partial(self._after, number, at_cut=True) if self._parked else lambda: None
        with thread_state.use(self._around):
            while not self._over and (run := self._queues[number].get()) is not None:
                try:
                    self._variables.copy().run(self._do_op, run, pause)
                except BaseException as error:
                    if not self._over:  # Otherwise, it is Stopped, or an error that this caused.
                        self._errors.append(error)
                self._after(number)

    def _after(self, number: int, at_cut: bool = False) -> None:
        """Ends a thread's op, and hands out what is ready then; after an error, nothing is.

        ``at_cut``: called by a forward between two stages; it returns when F of the next stage is ready.
        """
        with self._lock:
            if not self._over:
                row, run = self._at_work.pop(number)
                self._rows[row].popleft()
                self._ended.update([(run.kind[0], run.stage, i) for i in run.microbatches])
                self._hand_out()
        # A forward that goes on after Stopped comes here again.
        if at_cut and (self._over or self._queues[number].get() is None):
            raise Stopped

    def _hand_out(self) -> None:
        """Gives threads what is ready; ends the call if nothing is running then."""
        busy = [row for row, _ in self._at_work.values()]
        for number, row in enumerate(self._rows):
            if self._errors or not row or number in busy or self._alone and self._at_work:
                continue
            run, kind = row[0], row[0].kind[0]
            other = {"F": run.stage - 1, "B": run.stage + 1}.get(kind, -1)  # The stage for which it waits.
            if 0 <= other <= self._last and (kind, other, run.microbatches[0]) not in self._ended:
                continue
            thread = 0 if self._alone else number
            if self._parked and kind == "F":
                thread = len(self._rows) + run.microbatches[0]
            self._at_work[thread] = number, run
            self._queues[thread].put(run)
        if not self._at_work:
            self._stop()

    def _stop(self) -> None:
        self._over = True  # Without the lock: the thread that had it may have died.
        for queue in self._queues:
            queue.put(None)


@dataclass(eq=False)
class StepRun:
    """The ops of a call; ``run`` is what its threads do (see ``Executor``)."""

    call: Call
    stages: Sequence[RunningStage]
    pool: Pool | None  #: None: from now on, all ops run in the caller's thread (see ``core.thread_state``).
    workers: tuple[int, ...]  #: That of each stage.
    route: Callable[[int, int], Route | None]  #: That between two stages; None: nothing is copied.
    split: bool  #: Whether weight gradients may wait for W.
    drop_in: bool  #: Whether the caller's backward starts B: then the leaves of the stages' graphs must be known.
    hooks: LeafHooks  #: Where hooks of leaves are parked from their first B to the end of the rows.
    launching: LaunchLock
    recorder: Recorder | None = None
    traces: Sequence[StageTrace] = ()  #: Those of a recording: one per stage, or none.
    keep: bool = False  #: Whether graphs are needed again after B.
    wants_weights: bool = True  #: Whether B leaves anything for W.
    forwards: list[Any] = field(default_factory=list)  #: The microbatches: how each runs through the stages.
    #: The gradients of the caller's input (None) and target, for each leaf by microbatch.
    input_grads: dict[tuple[Key | None, int], dict[int, Tensor]] = field(default_factory=dict)
    shared: SharedParameters | None = None  #: None: no parameter is on another device than a stage that uses it.
    #: Of a call with a schedule: gets the microbatches' parts of the loss.
    scheduled: Any = None

    def timed(self, stage: int) -> Callable[[Stream], None] | None:
        """What records the copies of a stage; None if nothing does."""
        return self.traces[stage].copied if self.traces else None

    def run_rows(self, rows: OpRows) -> None:
        """Runs rows of ops; raises the first error."""
        pool = self.pool
        if pool is not None and threading.current_thread() in pool.threads:  # It would wait for itself.
            pool = None
        parked = pool is not None and bool(self.forwards) and self.forwards[0].own_forward
        try:
            Executor(rows, self.run, self.call.state.outside_forward(), self.call.variables, parked).run(pool)
        except BaseException:
            for stage in self.stages:  # What is freed now may still be being read or written.
                stage.store.clear()
                stream.wait(stream.current(stage.device), stage.compute)
            raise
        finally:
            self.forwards, self.scheduled = [], None  # They refer to this: the call is freed as soon as it is dropped.

    @contextmanager
    def at_work(self, op: OpRun) -> Iterator[None]:
        """Around the host's part of an op: on its stage's stream, with the launch lock, recorded."""
        compute = self.stages[op.stage].compute
        with stream.use(compute), nullcontext() if compute is None else self.launching.held():
            if self.traces:
                self.traces[op.stage].start()
            yield
            if self.traces:
                self.traces[op.stage].end(op.kind, op.microbatches)

    def run(self, op: OpRun, pause: Callable[[], None]) -> None:
        """Runs an op, in any thread; a forward that is one call goes past all stages, with ``pause`` between them."""
        kind, stage, i = op.kind, self.stages[op.stage], op.microbatches[0]
        if kind == "F" and self.forwards[i].own_forward:
            if op.stage == 0:
                self.call.contexts[i].run(self.forwards[i].forward_all, pause)
            return
        try:
            with self.at_work(op):
                if kind == "F":
                    self.call.contexts[i].run(self.forwards[i].forward, op.stage)
                elif kind == "R" and (dropped := stage.fwd_cache[i]).recompute is not None:  # Or it was kept.
                    stage.store.finish()  # What W has read is let go of: R needs as much.
                    segment = dropped.recompute(self, stage)
                    segment.arrived = dropped.arrived  # Not a copy: a later stage may be adding to it.
                    stage.fwd_cache[i] = segment
                elif kind[0] == "B":
                    self._backward(stage, i)
                if kind[-1] == "W":
                    stage.store.backward_weight(op.microbatches)
                    stage.store.finish()
        except BaseException as error:
            if kind != "F":
                what = {"R": "recomputation", "W": "weight gradients"}.get(kind, "backward")
                add_note(error, f"in the {what} of {stage.name}, microbatch {i}")
            raise

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
        segment.ran = True
        graph = segment.graph if segment.handle == RemovableHandle.next_id else segment.graph.fused()
        self.hooks.park(graph.leaves)
        with nullcontext() if stage.compute is None else self.launching.released():
            return backward_input(roots, grads, segment.entries, graph, keep)

    def gradients_of(self, key: Key | None, division: Any) -> dict[int, Tensor]:
        """The gradients of what the caller has given with this key, by the number of the leaf."""
        grads = {k: own for (of, k), own in self.input_grads.items() if of == key}
        return {k: division.gradient(k, [own.get(i) for i in range(len(division.rows))]) for k, own in grads.items()}
