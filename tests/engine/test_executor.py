"""The threads of a call: who does which op, what is done after a failure, and that every call ends."""
from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial

import pytest

from splitpipe import schedule
from splitpipe.core import thread_state
from splitpipe.core.worker import Pool
from splitpipe.engine.dropin import rows_of as clock_rows
from splitpipe.engine.executor import Executor, Stopped
from splitpipe.training.op_rows import OpRun, rows_of

F00, F10, B00, B10 = OpRun("F", 0, (0,)), OpRun("F", 1, (0,)), OpRun("B", 0, (0,)), OpRun("B", 1, (0,))


class Work:
    """Ops that do what they are told to, and note which thread has done what."""

    def __init__(self, stages: int, does: Callable[[OpRun], object] = lambda run: None) -> None:
        self.stages = stages
        self.does = does
        self.log: list[tuple[str, OpRun]] = []
        self.threads: dict[OpRun, str] = {}
        self.unwound: list[int] = []
        self.notes: list[OpRun] = []
        self.ends: list[bool] = []
        self.executor: Executor

    def whole(self, i: int, pause: Callable[[], None]) -> None:
        try:
            for stage in range(self.stages):
                self.does(OpRun("F", stage, (i,)))
                if stage + 1 < self.stages:
                    pause()
        except Stopped:
            self.unwound.append(i)
            raise

    def begin(self, run: OpRun) -> None:
        self.threads[run] = threading.current_thread().name
        self.log.append(("begin", run))

    def end(self, run: OpRun) -> None:
        self.log.append(("end", run))

    def other(self, run: OpRun) -> None:
        self.begin(run)
        self.does(run)
        self.end(run)

    forward = other

    def failed(self, run: OpRun, error: BaseException) -> None:
        self.notes.append(run)

    def done(self, complete: bool) -> None:
        self.ends.append(complete)

    @property
    def ended(self) -> list[OpRun]:
        return [run for what, run in self.log if what == "end"]


def run(
    rows: Sequence[Sequence[OpRun]], work: Work, clocked: bool = False, ahead: int | None = None, parked: bool = True
) -> Pool:
    executor = work.executor = Executor(
        rows, work, thread_state.capture(), copy_context(), parked=parked, clocked=clocked, ahead=ahead
    )
    pool = Pool([str(number) for number in range(executor.size)])
    executor.run(pool)
    return pool


def test_a_forward_stays_in_its_thread() -> None:
    work = Work(2)
    run([[F00, B00], [F10, B10]], work)
    assert work.ended == [F00, F10, B10, B00] and len(set(work.threads.values())) == 1
    assert work.ends == [True]


def test_a_forward_begins_while_another_is_parked() -> None:
    first, second = OpRun("F", 0, (0,)), OpRun("F", 0, (1,))
    begun = threading.Event()

    def does(op: OpRun) -> None:
        if op == second:
            begun.set()
        elif op.stage == 1:
            assert begun.wait(60)

    work = Work(2, does)
    run(clock_rows(2, [0, 1]), work, clocked=True)
    assert work.threads[first] == work.threads[OpRun("F", 1, (0,))] != work.threads[second]


def test_unparked_forwards_have_the_thread_of_their_row() -> None:
    work = Work(2)
    pool = run(clock_rows(4, [0, 1]), work, clocked=True, parked=False)
    assert pool.size == 2 and work.ends == [True]
    assert all(name == str(op.stage) for op, name in work.threads.items()) and len(work.ended) == 8


def test_w_and_b_of_the_only_microbatch_are_done_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)
    w = OpRun("W", 1, (0,))

    def does(op: OpRun) -> None:
        if op in (w, B00):
            both.wait()

    work = Work(2, does)
    run([[F00, B00], [F10, B10, w]], work)
    assert work.ends == [True]


PARKED = pytest.mark.parametrize("parked", [True, False], ids=["parked", "each a call"])


@PARKED
def test_a_stage_goes_no_further_ahead_than_it_may(parked: bool) -> None:
    work = Work(2)

    def does(op: OpRun) -> None:
        ended = False
        while op == F10 and not ended:
            with work.executor._lock:
                ended = ("F", 0, 2) in work.executor._ended
                assert ("F", 0, 3) not in work.executor._begun  # It was given out then, or not.

    work.does = does
    run(clock_rows(6, [0, 1]), work, clocked=True, ahead=2, parked=parked)
    assert work.ends == [True]


@PARKED
def test_the_earliest_error_is_raised(parked: bool) -> None:
    late = threading.Event()

    def does(op: OpRun) -> None:
        if op == OpRun("F", 0, (2,)):
            late.set()
            raise KeyError("of cycle 2, first in time")
        if op == F10:
            assert late.wait(60)
            raise ValueError("of cycle 1")

    work = Work(2, does)
    with pytest.raises(ValueError, match="of cycle 1"):
        run(clock_rows(4, [0, 1]), work, clocked=True, parked=parked)
    assert work.unwound == [1] * parked and set(work.notes) == {OpRun("F", 0, (2,)), F10} and work.ends == [False]


@PARKED
def test_by_a_schedule_nothing_is_begun_after_a_failure(parked: bool) -> None:
    def does(op: OpRun) -> None:
        if op == B10:
            raise ValueError("on purpose")

    work = Work(2, does)
    with pytest.raises(ValueError, match="on purpose"):
        run([[F00, B00], [F10, B10]], work, parked=parked)
    assert work.notes == [B10] and B00 not in work.threads and work.ends == [False]


def test_a_forward_that_catches_stopped_ends_too() -> None:
    class Catching(Work):
        def whole(self, i: int, pause: Callable[[], None]) -> None:
            try:
                super().whole(i, pause)
            except Stopped:
                pass

    late = threading.Event()

    def does(op: OpRun) -> None:
        if op == OpRun("F", 0, (1,)):
            late.set()
        if op.stage == 1:
            assert late.wait(60)
            raise ValueError("on purpose")

    work = Catching(2, does)
    with pytest.raises(ValueError, match="on purpose"):
        run(clock_rows(3, [0, 1]), work)
    assert 1 in work.unwound and all(op.stage == 0 for op in work.ended)


@PARKED
def test_an_error_outside_of_ops_stops_all_threads(parked: bool) -> None:
    class Broken(Work):
        def failed(self, run: OpRun, error: BaseException) -> None:
            raise LookupError("of the bookkeeping")

    def does(op: OpRun) -> None:
        if op == F10:
            raise ValueError("of an op")

    with pytest.raises(LookupError, match="of the bookkeeping"):
        run([[F00, B00], [F10, B10]], Broken(2, does), parked=parked)


@PARKED
def test_rows_that_cannot_go_on_are_an_error_and_no_hang(parked: bool) -> None:
    with pytest.raises(RuntimeError, match="no op of the schedule's rows can run"):
        run([[F00, B00], [F10]], Work(2), parked=parked)


NAMES = ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"]


@PARKED
@pytest.mark.parametrize("seed", range(20))
def test_random_rows_are_done_in_order_whatever_fails(seed: int, parked: bool) -> None:
    rng = random.Random(seed)
    built = schedule.build(rng.choice(NAMES), rng.choice([2, 4]), rng.choice([4, 8]))
    workers = list(range(built.devices)) if rng.random() < 0.7 else [0] * built.devices
    rows = rows_of(built, workers, count := rng.choice([1, 2, 4, 7]), rng.random() < 0.8, rng.randrange(count + 1))
    ops = [op for row in rows for op in row]
    wrong = rng.choice(ops) if rng.random() < 0.5 else None

    def does(op: OpRun) -> None:
        if op == wrong:
            raise ValueError("on purpose")

    work = Work(len(built.placement), does)
    try:
        run(rows, work, parked=parked)
        assert wrong is None and sorted(work.ended) == sorted(ops) and work.ends == [True]
    except ValueError:
        assert wrong is not None and work.notes == [wrong] and work.ends == [False]
    begun = [op for what, op in work.log if what == "begin"]
    for row in rows:
        mine = [op for op in begun if op in row]
        assert mine == list(row)[: len(mine)]
    place = {event: number for number, event in enumerate(work.log)}
    for (what, op), at in place.items():
        before = {"F": -1, "B": 1}.get(op.kind[0], 0)
        if what == "begin" and before and 0 <= op.stage + before < work.stages:
            needed = [each for each in ops if (each.kind[0], each.stage, each.microbatches) ==
                      (op.kind[0], op.stage + before, op.microbatches)]
            assert all(place["end", each] < at for each in needed)


@PARKED
def test_threads_of_a_call_keep_nothing_of_it(parked: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        work = Work(2)
        pool = run([[F00, B00], [F10, B10]], work, parked=parked)
        executor = weakref.ref(work.executor)
        del work.executor
        pool.run([(number, partial(str)) for number in range(pool.size)])
        assert executor() is None
    finally:
        gc.enable()
