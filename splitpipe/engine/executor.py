"""The threads of one call: each does what is ready, and a forward stays on the thread that began it.

    row of a worker   F0 F1 F2 B0 F3 B1 ...    the ops of a row in their order, one at a time
    row of another    F0 B0 F1 B1 ...

    a microbatch      F0 of stage 0 ── cut ── F0 of stage 1 ── ... ── end of the forward

If a forward is one call of the module's own code, its frames stay on its thread's stack between two stages, where the
thread waits for the next F. So each microbatch has a thread for its F, and each row one for its other ops.

Guarantees, and what would break them:

* No thread waits for an op that never comes. Who ends an op hands out all that is ready then, or, if nothing is running
any more, ends the call for all: both under one lock.
* When ``run`` ends, no frame of a forward is left: one that must not continue has Stopped raised at its cut. After
an error, ops that run are ended, and no other begins.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from queue import SimpleQueue

from splitpipe.core import thread_state
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.engine.rows import OpRun


class Stopped(BaseException):
    """Raised where the call was stopped; the reason is raised elsewhere."""


class Executor:
    """The work of the threads in one call: ``do`` runs an op, in the state ``around`` and with context variables.

    ``forward_all``: F of all stages of a microbatch, in one call, which calls what it is given between two stages.
    """

    def __init__(
        self, rows: Sequence[Sequence[OpRun]], do: Callable[[OpRun], None], around: State, variables: Context,
        forward_all: Callable[[int, Callable[[], None]], None] | None = None,
    ) -> None:
        ops, self._rows = [run for row in rows for run in row], [deque(row) for row in rows]
        self._do_op, self._around, self._variables, self._forward_all = do, around, variables, forward_all
        self._last, self._alone = max([run.stage for run in ops]), False
        self.size = len(rows) + (0 if forward_all is None else 1 + max([i for run in ops for i in run.microbatches]))
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
        with thread_state.use(self._around):
            while not self._over and (run := self._queues[number].get()) is not None:
                try:
                    if run.kind == "F" and self._forward_all is not None:
                        self._forward_all(run.microbatches[0], partial(self._after, number, at_cut=True))
                    else:
                        self._variables.copy().run(self._do_op, run)
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
            other = {"F": run.stage - 1, "B": run.stage + 1}.get(kind, -1)
            if 0 <= other <= self._last and (kind, other, run.microbatches[0]) not in self._ended:
                continue
            thread = 0 if self._alone else number
            if self._forward_all is not None and kind == "F":
                thread = len(self._rows) + run.microbatches[0]
            self._at_work[thread] = number, run
            self._queues[thread].put(run)
        if not self._at_work:
            self._stop()

    def _stop(self) -> None:
        self._over = True  # Without the lock: the thread that had it may have died.
        for queue in self._queues:
            queue.put(None)
