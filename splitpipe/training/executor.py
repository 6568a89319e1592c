"""Scheduled: each worker walks its row of ops, and forward and backward interleave inside one call of the model.

On the CPU autograd's backward runs in the worker that calls it, so that stages go backward side by side.

Guarantees: a worker that fails stops all others, and the first failure is the one that is raised. Nobody waits for a
value that will not come (see mailbox). An interrupt in the caller's thread stops the workers after the op that each is
in. When ``run`` returns or raises, no worker runs any more, unless a second interrupt ended the wait for that.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

from splitpipe.core import thread_state
from splitpipe.core.mailbox import Exchange, Stopped
from splitpipe.core.note import add_note, raise_first
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.play import play
from splitpipe.training.ops import StageOps


class OpRun(NamedTuple):
    """An op, or several W of one stage that are computed together."""

    kind: Kind
    stage: int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(str(Op(self.kind, self.stage, microbatch)) for microbatch in self.microbatches)


def rows_of(schedule: Schedule, workers: Sequence[int], microbatches: int, backward: bool) -> list[list[OpRun]]:
    """The row of each worker; ``workers`` has one for each row of the schedule. Only F, if there is no backward."""
    rows = _rows(first(schedule, microbatches), workers)
    return [_runs([op for op in row if backward or op.kind == "F"]) for row in rows]


def _rows(schedule: Schedule, workers: Sequence[int]) -> list[Sequence[Op]]:
    if len(set(workers)) == len(workers):
        return [schedule.rows[workers.index(worker)] for worker in range(len(workers))]
    # Rows of one worker become one, in the order in which a simulation starts their ops: all of them can run, one after
    # the other, so that a worker never waits for itself.
    starts, _ = play(schedule, Costs().times(schedule))
    timed: list[list[tuple[float, int, Op]]] = [[] for _ in range(max(workers) + 1)]
    for device, (row, times) in enumerate(zip(schedule.rows, starts)):
        timed[workers[device]] += [(time, device, op) for time, op in zip(times, row)]
    return [[op for _, _, op in sorted(row, key=lambda entry: entry[:2])] for row in timed]


def _runs(row: Sequence[Op]) -> list[OpRun]:
    """The row's runs: consecutive W become one run for each stage."""
    found: list[OpRun] = []
    for are_weights, ops in groupby(row, key=lambda op: op.kind == "W"):
        if not are_weights:
            found += [OpRun(op.kind, op.stage, (op.microbatch,)) for op in ops]
            continue
        microbatches: dict[int, list[int]] = {}
        for op in ops:
            microbatches.setdefault(op.stage, []).append(op.microbatch)
        found += [OpRun("W", stage, tuple(numbers)) for stage, numbers in microbatches.items()]
    return found


@dataclass
class Execution:
    """The workers' part of one call: the ops of each stage, the rows of ops, the exchange between stages.

    ``around`` is the thread-local state between the layers. ``done`` is called by the last thread to end its part,
    since no interrupt ever reaches one.
    """

    stages: Sequence[StageOps]
    rows: Sequence[Sequence[OpRun]]
    exchange: Exchange
    around: State
    done: Callable[[], None]
    _doing: dict[int, OpRun] = field(default_factory=dict)
    _errors: list[BaseException] = field(default_factory=list)
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: int = 0

    def run(self, pool: Pool, variables: Context) -> None:
        """Each worker walks a row to its end, in the caller's context variables; raises the first error."""
        # The first stage's worker comes last, as it starts at once: the others should already wait for its values.
        workers = reversed(range(len(self.rows)))
        walks = [(worker, partial(variables.copy().run, self._walk, worker)) for worker in workers]
        try:
            pool.run(walks, self._interrupted)
            if self._errors:
                raise_first(self._errors)
        except BaseException:
            self._errors = []  # A traceback holds this frame.
            raise

    def _interrupted(self, error: BaseException) -> None:
        """The caller was interrupted, or a worker's thread has died."""
        self._stop()
        doing = list(self._doing.values())  # One atomic step: workers write there until they have stopped.
        add_note(error, f"while the workers did {', '.join(map(str, doing)) or 'nothing yet'}")

    def _stop(self) -> None:
        self._stopped = True
        self.exchange.stop()

    def _walk(self, worker: int) -> None:
        """The row of a worker, in it."""
        op, row = None, self.rows[worker]
        try:
            with thread_state.entered(self.around):
                for op in row:
                    if self._stopped:
                        return
                    self._doing[worker] = op
                    do(op, self.stages[op.stage])
                for stage in {op.stage for op in row}:
                    self.stages[stage].close()
        except Stopped:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._stop()
            add_note(error, "before its first op" if op is None else f"in {op}, {self.stages[op.stage].stage}")
        finally:
            with self._lock:
                self._ended += 1
                last = self._ended == len(self.rows)
            if last:
                self.done()


def do(op: OpRun, ops: StageOps) -> None:
    """Does an op of a stage."""
    if op.kind == "F":
        ops.forward(op.microbatches[0])
    elif op.kind == "W":
        ops.backward_weight(op.microbatches)
    else:
        ops.backward(op.microbatches[0])
        if op.kind == "BW":
            ops.backward_weight(op.microbatches)
    if ops.trace is not None:
        ops.trace.note(op.kind, op.microbatches)
