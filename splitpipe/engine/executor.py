"""The threads of one call of any module: each does what is ready, and keeps a forward that it has begun.

    row of stage 0    F0 F1 F2 B0 F3 B1 ...    the ops of a row in their order, one at a time
    row of stage 1    F0 B0 F1 B1 ...

    a thread          F0 of stage 0 ── border ── F0 of stage 1 ── end of the forward ── B0 of stage 0 ── F4 ...

A microbatch's forward is one call of the module's own code. Between two stages, its frames stay on its thread's stack,
so no other thread can continue it: the thread waits until the next F is ready. Any other op is done by a free thread,
preferably by one that has just ended an op. So work changes threads as rarely as possible. A change costs a wake-up,
and if there are only as many cores as stages, the woken thread may have to wait for another stage's thread on its core.

Guarantees, and what would break them:

* No thread waits for an op that never comes. An op is ready when those that it depends on have ended, so that its
inputs are there. The thread that ends an op hands out all that is ready then, and ends the call for all if nothing is
running any more: both under one lock. An op that ended outside ``_after`` would be waited for.
* An op that needs a free thread finds one. There is one per microbatch, and, with B or W, another one for each row but
one: while these are at work, a forward has ended, so its thread is free.
* If nothing is left on a thread's stack between two stages (``parked`` is False), each row has a separate thread.
* When ``run`` returns or raises, no frame of a forward is left, unless a second interrupt ended the wait for that: a
forward that must not continue has Stopped raised at its border.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from splitpipe.core import thread_state
from splitpipe.core.note import add_note, raise_first
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.training.op_rows import OpRun


class Stopped(BaseException):
    """Raised where the call was stopped; the reason is raised elsewhere."""


class Work(Protocol):
    """What the threads do."""

    def whole(self, i: int, pause: Callable[[], None]) -> None:
        """The whole forward of a microbatch; between two stages, it calls ``pause``, which may raise Stopped."""

    def forward(self, run: OpRun) -> None:
        """F of a stage, if it is a separate call; then none of the next three is called."""

    def begin(self, run: OpRun) -> None:
        """Begins F of a stage, in the thread of its microbatch."""

    def end(self, run: OpRun) -> None:
        """Ends F of a stage, in that thread."""

    def other(self, run: OpRun) -> None:
        """B, W or BW, in any thread."""

    def failed(self, run: OpRun, error: BaseException) -> None:
        """Records where an error was raised."""

    def done(self, complete: bool) -> None:
        """Called by the last thread when all have ended, since no interrupt ever reaches a worker."""


class Executor:
    """The work of the threads in one call.

    ``parked``: whether a forward is one call, which stays on its thread's stack between two stages. ``clocked``: after
    an op has failed, whether ops of the clock cycles up to its own are still done; otherwise, none is. ``ahead``: how
    many microbatches may wait at a stage's end before the next stage takes them.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[OpRun]],
        work: Work,
        around: State,
        variables: Context,
        *,
        parked: bool = True,
        clocked: bool = False,
        ahead: int | None = None,
    ) -> None:
        self._rows = rows
        self._row_of = {run.stage: number for number, row in enumerate(rows) for run in row}
        self._last = max(self._row_of)
        self._work = work
        self._around = around
        self._contexts = [variables.copy() for _ in rows]
        self._parked = parked
        self._clocked = clocked
        self._ahead = ahead
        ops = [run for row in rows for run in row]
        backward = any(run.kind != "F" for run in ops)
        self.size = len(rows)
        if parked:
            self.size = len({i for run in ops for i in run.microbatches}) + backward * (sum(map(bool, rows)) - 1)
        self._lock = threading.Lock()
        # For rows.
        self._next = [0] * len(rows)
        self._at_work: dict[int, OpRun] = {}
        self._begun: set[tuple[str, int, int]] = set()
        self._ended: set[tuple[str, int, int]] = set()
        self._until = float("inf")  # The last clock cycle to be done.
        self._errors: list[tuple[int, int, BaseException]] = []
        # For threads.
        self._given: list[SimpleQueue[OpRun | None]] = [SimpleQueue() for _ in range(self.size)]
        self._free = list(reversed(range(self.size)))  # The last one is taken first: it was the last to work.
        self._doing: dict[int, OpRun] = {}
        self._thread_of: dict[int, int] = {}  # The thread of each microbatch whose forward has begun.
        self._over = False
        self._left = self.size

    def run(self, pool: Pool) -> None:
        """Does all ops; raises the first error."""
        for number, run in self._ready()[1]:
            self._given[number].put(run)
        try:
            pool.run([(number, partial(self._belong, number)) for number in range(self.size)], self._interrupted)
            raise_first([error for *_, error in sorted(self._errors, key=lambda found: found[:2])])
            if not self._complete:
                raise RuntimeError("no op of the schedule's rows can run: expected rows without a deadlock.")
        except BaseException:
            self._errors = []  # A traceback refers to this frame.
            raise

    @property
    def _complete(self) -> bool:
        return not self._at_work and all(count == len(row) for count, row in zip(self._next, self._rows))

    def _pause(self, i: int) -> None:
        """Ends F of a stage, and begins that of the next one when it is ready. Called by the forward."""
        if self._over:
            raise Stopped
        number = self._thread_of[i]
        run = self._doing[number]
        self._work.end(run)
        then = self._after(number, run, border=True) or self._given[number].get()
        if then is None:
            raise Stopped
        self._doing[number] = then
        self._work.begin(then)

    def _belong(self, number: int) -> None:
        """What a thread does, from start to end."""
        try:
            with thread_state.entered(self._around):
                while not self._over and (run := self._given[number].get()) is not None:
                    then: OpRun | None = run
                    while then is not None:
                        then = self._do(number, then)
        except BaseException:
            self._stop()
            raise
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._work.done(self._complete and not self._errors)

    def _do(self, number: int, run: OpRun) -> OpRun | None:
        """Runs an op, or a forward to its end; returns what the thread does next, if there is something."""
        self._doing[number] = run
        ended = False
        try:
            if run.kind == "F" and not self._parked:
                self._work.forward(run)
            elif run.kind == "F":
                [i] = run.microbatches
                self._thread_of[i] = number
                self._work.begin(run)
                self._work.whole(i, partial(self._pause, i))
                if self._over:  # The user's code has caught Stopped.
                    return None
                self._work.end(self._doing[number])
            else:
                self._contexts[self._row_of[run.stage]].run(self._work.other, run)
            ended = True
        except BaseException as error:
            if self._over:  # Stopped, or an error that it caused.
                return None
            self._fail(self._doing[number], error)
        return self._after(number, self._doing[number], ended)

    def _fail(self, run: OpRun, error: BaseException) -> None:
        self._work.failed(run, error)
        with self._lock:
            clock = self._clock(run)
            self._errors.append((clock, run.stage if self._clocked else 0, error))
            self._until = min(self._until, clock if self._clocked else -1)

    def _interrupted(self, error: BaseException) -> None:
        """Stops the call: the caller was interrupted, or a thread has died."""
        self._until = -1
        self._stop()
        doing = list(self._at_work.values())  # In one atomic step: threads write there until they have stopped.
        add_note(error, f"while the workers did {', '.join(map(str, doing)) or 'nothing yet'}")

    def _stop(self) -> None:
        self._over = True  # Without the lock: the thread that had it may have died.
        for given in self._given:
            given.put(None)

    # Which thread does what.

    def _after(self, number: int, run: OpRun, ended: bool = True, border: bool = False) -> OpRun | None:
        """Ends a thread's op; returns what it does next, if there is something."""
        with self._lock:
            self._at_work.pop(self._row_of[run.stage], None)
            if ended:
                self._ended.update([(run.kind[0], run.stage, i) for i in run.microbatches])
            mine, others = self._ready(number, run.microbatches[0] if border else None)
            if mine is None and not border:
                self._free.append(number)
            over = not self._at_work
        for other, then in others:
            self._given[other].put(then)
        if over:
            self._stop()
        return mine

    def _ready(
        self, here: int | None = None, border: int | None = None
    ) -> tuple[OpRun | None, list[tuple[int, OpRun]]]:
        """Hands out what is ready, to thread ``here`` and others. ``border``: its microbatch, at a border."""
        mine: OpRun | None = None
        others = []
        for number, row in enumerate(self._rows):
            if number in self._at_work or self._next[number] == len(row):
                continue
            run = row[self._next[number]]
            i = run.microbatches[0]
            if not self._may_begin(run, i):
                continue
            if not self._parked:
                thread = number
            elif run.kind == "F" and run.stage:
                thread = self._thread_of[i]
            elif here is not None and border is None and mine is None:
                thread = here
            elif self._free:
                thread = self._free.pop()
            else:
                continue
            self._next[number] += 1
            self._at_work[number] = run
            self._begun.add((run.kind[0], run.stage, i))
            if thread == here:
                mine = run
            else:
                others.append((thread, run))
        return mine, others

    def _may_begin(self, run: OpRun, i: int) -> bool:
        kind, stage = run.kind[0], run.stage
        if self._clock(run) > self._until:
            return False
        if kind == "B":
            return stage == self._last or ("B", stage + 1, i) in self._ended
        if kind == "W":
            return True
        if self._ahead is not None and stage < self._last and i >= self._ahead:
            if ("F", stage + 1, i - self._ahead) not in self._begun:
                return False
        return not stage or ("F", stage - 1, i) in self._ended

    def _clock(self, run: OpRun) -> int:
        return run.microbatches[0] + run.stage if self._clocked else 0
