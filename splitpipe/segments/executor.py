"""The threads of one call of any module: each does what is ready, and stays with a forward that it has begun.

    row of stage 0    F0 F1 F2 B0 F3 B1 ...    the ops of a row in their order, one at a time
    row of stage 1    F0 B0 F1 B1 ...

    a thread          F0 of stage 0 ── border ── F0 of stage 1 ── end of the forward ── B0 of stage 0 ── F4 ...

A microbatch's forward is one call of the module's own code. Between two stages its frames stay on its thread's stack,
so that no other thread can go on with it: the thread waits until the next F is ready. Any other op is done by whoever
is free, at best by a thread that has just ended one. So threads change as seldom as they can. A change costs a wake-up,
and where there are no more cores than stages, the thread that wakes may stand behind another stage's on its core.

Guarantees, and what would break them:

* Nobody waits for an op that never comes. An op is ready when those that it depends on have ended, so that what it is
  sent is there. Who ends one gives out all that is ready then, and ends the call for everybody if nothing is at work
  any more: both under one lock. An op that ended outside of ``_after`` would be waited for.
* An op that needs a free thread finds one. There is one for each microbatch; and with B or W, one more for each row but
  one: while some are at work, a forward has ended, and its thread is free.
* Where nothing is left on a thread's stack between two stages (``parked`` is False), each row has a thread of its own.
* When ``run`` returns or raises, no frame of a forward is left, unless a second interrupt ended the wait for that: one
  that is not to go on has Stopped raised at its border.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from splitpipe.core import thread_state
from splitpipe.core.note import add_note, raise_first
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.training.rows import OpRun


class Stopped(BaseException):
    """The call was stopped; the reason is raised elsewhere."""


class Work(Protocol):
    """What the threads do."""

    def walk(self, i: int) -> None:
        """The whole forward of a microbatch; between two stages it calls ``Executor.pause``."""

    def forward(self, run: OpRun) -> None:
        """F of a stage, if it is a call of its own; then none of the next three is called."""

    def begin(self, run: OpRun) -> None:
        """F of a stage begins, in the thread of its microbatch."""

    def end(self, run: OpRun) -> None:
        """F of a stage has ended, in that thread."""

    def other(self, run: OpRun) -> None:
        """B, W or BW, in any thread."""

    def failed(self, run: OpRun, error: BaseException) -> None:
        """Notes where an error was raised."""

    def done(self, complete: bool) -> None:
        """All threads are through; called by the last of them, as no interrupt ever reaches one."""


class Executor:
    """The threads' part of one call.

    ``parked``: whether a forward is one call, which stays on its thread's stack between two stages. ``clocked``: after
    an op has failed, those of no later clock cycle are still done; else none is. ``ahead``: so many microbatches may be
    at a stage's end before the next one takes them.
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
        # Of the rows.
        self._next = [0] * len(rows)
        self._at_work: dict[int, OpRun] = {}
        self._begun: set[tuple[str, int, int]] = set()
        self._ended: set[tuple[str, int, int]] = set()
        self._until = float("inf")  # The last clock cycle that is to be done.
        self._errors: list[tuple[int, int, BaseException]] = []
        # Of the threads.
        self._given: list[SimpleQueue[OpRun | None]] = [SimpleQueue() for _ in range(self.size)]
        self._free = list(reversed(range(self.size)))  # The last one is taken first: it was at work last.
        self._doing: dict[int, OpRun] = {}
        self._thread_of: dict[int, int] = {}  # Of each microbatch whose forward has begun.
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
                raise RuntimeError("no op of the schedule's rows can go on: expected rows that a simulation can play.")
        except BaseException:
            self._errors = []  # A traceback holds this frame.
            raise

    @property
    def _complete(self) -> bool:
        return not self._at_work and all(count == len(row) for count, row in zip(self._next, self._rows))

    def pause(self, i: int) -> None:
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
        """A thread's part."""
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
        """Does an op, or a forward to its end; gives what the thread does next, if it has something."""
        self._doing[number] = run
        ended = False
        try:
            if run.kind == "F" and not self._parked:
                self._work.forward(run)
            elif run.kind == "F":
                [i] = run.microbatches
                self._thread_of[i] = number
                self._work.begin(run)
                self._work.walk(i)
                if self._over:  # Its own code has caught Stopped.
                    return None
                self._work.end(self._doing[number])
            else:
                self._contexts[self._row_of[run.stage]].run(self._work.other, run)
            ended = True
        except BaseException as error:
            if self._over:  # Stopped, or what became of that.
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
        """The caller was interrupted, or a thread has died."""
        self._until = -1
        self._stop()
        doing = list(self._at_work.values())  # One atomic step: threads write there until they have stopped.
        add_note(error, f"while the workers did {', '.join(map(str, doing)) or 'nothing yet'}")

    def _stop(self) -> None:
        self._over = True  # No lock: the thread that had it may have died.
        for given in self._given:
            given.put(None)

    # Who does what.

    def _after(self, number: int, run: OpRun, ended: bool = True, border: bool = False) -> OpRun | None:
        """The thread is through with an op; gives what it does next, if it has something."""
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
        """Gives out what is ready: what the thread ``here`` does, and the others'. ``border``: its microbatch's."""
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
