"""The threads of one call: each does what is ready, and a forward stays on the thread that began it.

    row of a worker   F0 F1 F2 B0 F3 B1 ...    the ops of a row in their order, one at a time
    row of another    F0 B0 F1 B1 ...

    a thread          F0 of stage 0 ── cut ── F0 of stage 1 ── end of the forward ── B0 of stage 0 ── F4 ...

If a forward is one call of the module's own code, its frames stay on its thread's stack between two stages, where the
thread waits for the next F. Any other op is done by a free thread, preferably one that has just ended an op, since a
wake-up costs time. If each F is a call, each row has a thread.

Guarantees, and what would break them:

* No thread waits for an op that never comes. Who ends an op hands out all that is ready then, or, if nothing is running
any more, ends the call for all: both under one lock.
* With a pool, an op that needs a free thread finds one. There is one per microbatch and, with B or W, one for each row
but one: if all of these work, at least one forward has ended, and its thread is free.
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
        self._last = max([run.stage for run in ops])
        self.size, self._free = len(rows), None if forward_all is None else list[int]()  # None: each row has a thread.
        if self._free is not None:
            backward = any([run.kind != "F" for run in ops])
            self.size = len({i for run in ops for i in run.microbatches}) + backward * (sum(map(bool, rows)) - 1)
            self._free += range(self.size)  # The last one is taken first: it was the last to work.
        self._queues: list[SimpleQueue[OpRun | None]] = [SimpleQueue() for _ in range(self.size)]
        self._thread_of: dict[int, int] = {}  # The thread of each microbatch whose forward has begun.
        self._lock = threading.Lock()
        self._at_work: dict[int, tuple[int, OpRun]] = {}  # By thread: the number of the row, and the op.
        self._ended: set[tuple[str, int, int]] = set()
        self._errors: list[BaseException] = []
        self._over = False

    def run(self, pool: Pool | None) -> None:
        """Does all ops; raises the first error. Without a pool, the caller's thread does one after another."""
        if pool is None:
            self._free = [0]
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
                        [i] = run.microbatches
                        self._thread_of[i] = number
                        self._forward_all(i, partial(self._pause, number))
                    else:
                        self._variables.copy().run(self._do_op, run)
                except BaseException as error:
                    if not self._over:  # Otherwise, it is Stopped, or an error that this caused.
                        self._errors.append(error)
                self._after(number)

    def _pause(self, number: int) -> None:
        """Ends F of a stage, and returns when that of the next one is ready. Called by the forward."""
        self._after(number, at_cut=True)
        if self._over or self._queues[number].get() is None:  # A forward that goes on after Stopped comes here again.
            raise Stopped

    def _after(self, number: int, at_cut: bool = False) -> None:
        """Ends a thread's op, and hands out what is ready then; after an error, nothing is."""
        with self._lock:
            if self._over:
                return
            row, run = self._at_work.pop(number)
            self._rows[row].popleft()
            self._ended.update([(run.kind[0], run.stage, i) for i in run.microbatches])
            if self._free is not None and not at_cut:
                self._free.append(number)
            self._hand_out()

    def _hand_out(self) -> None:
        """Gives threads what is ready; ends the call if nothing is running then."""
        busy = [row for row, _ in self._at_work.values()]
        for number, row in enumerate(self._rows):
            if self._errors or not row or number in busy:
                continue
            run, kind = row[0], row[0].kind[0]
            other = {"F": run.stage - 1, "B": run.stage + 1}.get(kind, -1)
            if 0 <= other <= self._last and (kind, other, run.microbatches[0]) not in self._ended:
                continue
            if self._free is None:
                thread = number
            elif self._forward_all is not None and run.kind == "F" and run.stage:
                thread = self._thread_of[run.microbatches[0]]
            elif self._free:
                thread = self._free.pop()
            else:
                continue
            self._at_work[thread] = number, run
            self._queues[thread].put(run)
        if not self._at_work:
            self._stop()

    def _stop(self) -> None:
        self._over = True  # Without the lock: the thread that had it may have died.
        for queue in self._queues:
            queue.put(None)
