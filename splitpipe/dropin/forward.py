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

Guarantees: what (i, j) raises ends the pass with clock cycle i + j. Later ones are given up; those before, and its own,
are still done, so that of several failures the first of the clock is raised, whoever was faster. A value that is given
up is sent on as lost. So nobody waits for one that never comes: a worker walks its row to the end, or the pass is
aborted, which stops every mailbox. When ``run`` returns or raises, no worker is at work any more.
"""
from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from splitpipe.batchnorm import numbered
from splitpipe.core import thread_state
from splitpipe.core.graph import LAST, reserve
from splitpipe.core.mailbox import Mailbox, Stopped
from splitpipe.core.note import raise_first
from splitpipe.core.rng import Seeds
from splitpipe.core.stream import Stream
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.dropin.border import Border, passed, routes
from splitpipe.stage.checkpoint import Batch
from splitpipe.stage.stage import Parcel, Result, Skips, Stage, Task


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The (i, j) of each clock cycle, first stage first."""
    for clock in range(m + n - 1):
        yield [(clock - j, j) for j in range(max(1 + clock - m, 0), min(1 + clock, n))]


@dataclass
class Pass:
    """One forward of the whole batch.

    Args:
        stages: in order.
        workers: the worker of each stage.
        pool: the workers.
        named: gives a stream of a device for some use, the same one every time.
        state: the caller's thread-local state.
        seeds: of every (stage, microbatch).
        stop: the first microbatch that is not checkpointed.
        batch: what the microbatches are parts of.
    """

    stages: Sequence[Stage]
    workers: Sequence[int]
    pool: Pool
    named: Callable[[torch.device, str], Stream]
    state: State
    seeds: Seeds
    stop: int
    batch: Batch
    _variables: list[contextvars.Context] = field(default_factory=list)
    _mail: list[Mailbox] = field(default_factory=list)
    _borders: list[Border] = field(default_factory=list)
    _end: int = 0  # The last clock cycle to be done.
    _errors: list[tuple[int, int, BaseException]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, microbatches: Sequence[Parcel], variables: contextvars.Context) -> list[Parcel]:
        """The output of each microbatch.

        Args:
            microbatches: the inputs, on the first stage's device.
            variables: the caller's context variables.

        Raises:
            BaseException: that of the first clock cycle in which a stage raised, of the first stage that did; or one
                that was raised here.
        """
        m, n = len(microbatches), len(self.stages)
        self._end = m + n
        self._variables = [numbered(variables.copy(), i) for i in range(m)]
        self._mail = [Mailbox() for _ in range(max(self.workers) + 1)]
        skips = passed(self.stages)
        ways = routes(self.stages, list(skips.values()), self.named)
        self._borders = [
            Border(self.stages, j, self.workers, self._mail, ways, skips, m, self.state.grad) for j in range(n)
        ]
        for i, parcel in enumerate(microbatches):
            self._mail[self.workers[0]].put((0, i), (parcel, None, None))
        # The user's hooks and modes see the ops of a single thread, in the same order every time.
        if self.state.observed:
            self._in_turn(m)
        else:
            self._side_by_side(m)
        outputs = self._borders[-1].outputs
        return [outputs.pop(i) for i in range(m)]

    def _in_turn(self, m: int) -> None:
        self.pool.run([(worker, self._reserve) for worker in range(len(self._mail))])
        for cycle in clock_cycles(m, len(self.stages)):
            for i, j in cycle:
                given = self._borders[j].take(i)
                assert given is not None
                [result] = self.pool.run([(self.workers[j], self._task(i, j, *given, inside=False))])
                self._give(i, j, result)

    def _side_by_side(self, m: int) -> None:
        rows: list[list[tuple[int, int]]] = [[] for _ in self._mail]
        for cycle in clock_cycles(m, len(self.stages)):
            for i, j in cycle:
                rows[self.workers[j]].append((i, j))
        # The first stage's last: it starts at once, and the others' threads should be waiting for it by then.
        walks = [(worker, partial(self._walk, row)) for worker, row in reversed(list(enumerate(rows)))]
        try:
            self.pool.run(walks, lambda _: self._stop())
            raise_first([error for *_, error in sorted(self._errors, key=lambda found: found[:2])])
        except BaseException:
            # Its traceback holds this frame, and would hold what was on its way.
            self._errors, self._mail, self._borders = [], [], []
            raise

    def _walk(self, row: Sequence[tuple[int, int]]) -> None:
        """A worker's part."""
        try:
            self._reserve()
            # What is done between the layers is none of the user's modes' business.
            with thread_state.entered(replace(self.state, function_modes=())):
                for i, j in row:
                    self._do(i, j)
        except Stopped:
            pass
        except BaseException as error:
            self._abort(error)

    def _reserve(self) -> None:
        """Keeps the numbers that a border ranks by from the nodes of the thread."""
        if self.state.grad:
            reserve(LAST + 1 + len(self._variables) * len(self.stages))

    def _do(self, i: int, j: int) -> None:
        border = self._borders[j]
        try:
            given = border.take(i)
            if given is not None and i + j <= self._end:
                self._give(i, j, self._task(i, j, *given, inside=not self.state.function_modes)())
                return
        except Stopped:
            raise
        except BaseException as error:
            self._fail(error, i + j, j)
        border.lose(i)

    def _task(self, i: int, j: int, value: Parcel, skips: Skips, inside: bool) -> Task:
        return Task(
            stage=self.stages[j],
            number=(i, len(self._variables)),
            value=value,
            skips=skips,
            state=self.state,
            variables=self._variables[i],
            seed=self.seeds.of(j, i),
            checkpoint=i < self.stop,
            batch=self.batch,
            inside=inside,
        )

    def _give(self, i: int, j: int, result: Result) -> None:
        if result.drew:
            self.seeds.drew = True
        self._borders[j].give(i, result)

    def _fail(self, error: BaseException, clock: int, j: int) -> None:
        with self._lock:
            self._errors.append((clock, j, error))
            self._end = min(self._end, clock)

    def _abort(self, error: BaseException) -> None:
        """Something went wrong outside of the stages: all stop as soon as they can."""
        self._fail(error, -1, 0)
        self._stop()

    def _stop(self) -> None:
        self._end = -1
        for mail in self._mail:
            mail.stop()
