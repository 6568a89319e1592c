"""Drop-in: forward in clock cycles lays down one autograd graph, and whoever goes backward walks it.

    clock   stage 0   stage 1   stage 2           i: microbatch, of m
    0       (0,0)                                 j: stage, of n
    1       (1,0)     (0,1)
    2       (2,0)     (1,1)     (0,2)
    3                 (2,1)     (1,2)
    4                           (2,2)

Each worker walks the (i, j) of its stages in the order of the clock, and waits for what it needs, not for the clock: a
stage that is early goes on. (Without gradients to come it goes no further than two values ahead, as those are all that
it keeps.) What is between two stages is in ``border``.

Guarantees: after (i, j) fails, the tasks of cycles up to i + j still run, and later ones are skipped. So the error of
the earliest cycle is raised, whichever thread was faster. A value that is not computed is sent on as lost. So nobody
waits for one that never comes: a worker walks its row to the end, or the forward is aborted, which stops every mailbox.
When ``run`` returns or raises, no worker runs any more, unless a second interrupt ended the wait for that.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from splitpipe.core import thread_state
from splitpipe.core.graph import LAST, reserve
from splitpipe.core.mailbox import Mailbox, Stopped
from splitpipe.core.note import raise_first
from splitpipe.core.worker import Pool
from splitpipe.dropin.border import LayersWork
from splitpipe.stage.call import Call


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The (i, j) of each clock cycle, first stage first."""
    for clock in range(m + n - 1):
        yield [(clock - j, j) for j in range(max(1 + clock - m, 0), min(1 + clock, n))]


class Forward:
    """One forward of the whole batch."""

    def __init__(self, call: Call, pool: Pool, workers: Sequence[int], work: LayersWork) -> None:
        self._call = call
        self._pool = pool
        self._workers = workers
        self._mail = [Mailbox() for _ in range(max(workers) + 1)]
        self._work = work
        self._borders = work.borders([self._mail[worker] for worker in workers])
        self._end = len(call.rows) + len(workers)  # The last clock cycle to be done.
        self._errors: list[tuple[int, int, BaseException]] = []
        self._stopped = False
        self._lock = threading.Lock()

    def run(self) -> list[Any]:
        """The output of each microbatch."""
        call, m = self._call, len(self._call.rows)
        try:
            for i, message in enumerate(self._work.inputs()):
                self._mail[self._workers[0]].put((0, i), message)
            # The user's hooks and modes see the ops of a single thread, in the same order every time.
            if call.state.observed:
                self._in_turn(m)
            else:
                self._side_by_side(m)
        except BaseException:
            # Its traceback holds this frame, and would hold what was on its way.
            self._errors, self._mail, self._borders = [], [], []
            raise
        outputs = self._borders[-1].outputs
        return [outputs.pop(i) for i in range(m)]

    def _in_turn(self, m: int) -> None:
        self._pool.run([(worker, self._reserve) for worker in range(len(self._mail))])
        for cycle in clock_cycles(m, len(self._workers)):
            for i, j in cycle:
                given = self._borders[j].take(i)
                assert given is not None  # What fails here is raised at once.
                task = self._work.task(i, j, given)
                [result] = self._pool.run([(self._workers[j], task)])
                self._borders[j].give(i, result)

    def _side_by_side(self, m: int) -> None:
        rows: list[list[tuple[int, int]]] = [[] for _ in self._mail]
        for cycle in clock_cycles(m, len(self._workers)):
            for i, j in cycle:
                rows[self._workers[j]].append((i, j))
        # The first stage's worker comes last, as it starts at once: the others should already wait for its values.
        walks = [(worker, partial(self._walk, row)) for worker, row in reversed(list(enumerate(rows)))]
        self._pool.run(walks, lambda _: self._stop())
        if self._errors:
            raise_first([error for *_, error in sorted(self._errors, key=lambda found: found[:2])])

    def _walk(self, row: Sequence[tuple[int, int]]) -> None:
        """A worker's part."""
        try:
            self._reserve()
            # The user's function modes don't see what the pipeline itself does between the layers.
            with thread_state.entered(self._call.state._replace(function_modes=())):
                for i, j in row:
                    self._do(i, j)
        except Stopped:
            pass
        except BaseException as error:
            self._abort(error)

    def _reserve(self) -> None:
        """Keeps the numbers that a border ranks by from the nodes of the thread."""
        if self._call.state.grad:
            reserve(LAST + 1 + len(self._call.rows) * len(self._workers))

    def _do(self, i: int, j: int) -> None:
        border = self._borders[j]
        try:
            given = border.take(i)
            if given is not None and i + j <= self._end and not self._stopped:
                border.give(i, self._work.task(i, j, given, inside=True)())
                return
        except Stopped:
            raise
        except BaseException as error:
            self._fail(error, i + j, j)
        border.lose(i)

    def _fail(self, error: BaseException, clock: int, j: int) -> None:
        with self._lock:
            self._errors.append((clock, j, error))
            self._end = min(self._end, clock)

    def _abort(self, error: BaseException) -> None:
        """Something went wrong outside of the stages: all stop as soon as they can."""
        self._fail(error, -1, 0)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True  # No lock: the thread that had it may have died.
        for mail in self._mail:
            mail.stop()
