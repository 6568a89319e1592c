"""The threads of a call: who does which op, what is done after a failure, and that every call ends."""
from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context

import pytest

from splitpipe import schedule
from splitpipe.core import thread_state
from splitpipe.core.worker import Pool
from splitpipe.engine.executor import Executor
from splitpipe.engine.rows import OpRun, schedule_rows

F00, F10, B00, B10 = OpRun("F", 0, (0,)), OpRun("F", 1, (0,)), OpRun("B", 0, (0,)), OpRun("B", 1, (0,))
#: Forwards by cuts, which are parked at split points; ops that are each a call; all in the caller's thread.
HOW = pytest.mark.parametrize("how", ["parked", "called", "caller"])


class Work:
    """Ops that do what they are told to, and note which thread has done what."""

    def __init__(self, stages: int, does: Callable[[OpRun], object] = lambda run: None) -> None:
        self.stages = stages
        self.does = does
        self.log: list[tuple[str, OpRun]] = []
        self.threads: dict[OpRun, str] = {}
        self.executor: Executor

    def whole(self, i: int, pause: Callable[[], None]) -> None:
        for stage in range(self.stages):
            self.run(OpRun("F", stage, (i,)))
            if stage + 1 < self.stages:
                pause()

    def run(self, op: OpRun) -> None:
        self.threads[op] = threading.current_thread().name
        self.log.append(("begin", op))
        self.does(op)
        self.log.append(("end", op))

    @property
    def ended(self) -> list[OpRun]:
        return [run for what, run in self.log if what == "end"]


def run(rows: Sequence[Sequence[OpRun]], work: Work, how: str = "parked") -> Pool | None:
    whole = work.whole if how == "parked" else None
    executor = work.executor = Executor(rows, work.run, thread_state.capture(), copy_context(), whole)
    pool = None if how == "caller" else Pool([str(number) for number in range(executor.size)])
    executor.run(pool)
    return pool


@pytest.mark.parametrize("how", ["parked", "called"])
def test_an_error_outside_of_ops_stops_all_threads(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise LookupError("of the bookkeeping")

    def does(op: OpRun) -> None:
        if op == F10:
            monkeypatch.setattr(Executor, "_after", broken)

    with pytest.raises(LookupError, match="of the bookkeeping"):
        run([[F00, B00], [F10, B10]], Work(2, does), how)


@HOW
@pytest.mark.parametrize("rows", [[[F00, B00], [F10]], [[B00, F00], [F10, B10]]])
def test_rows_that_cannot_go_on_are_an_error_and_no_hang(rows: list[list[OpRun]], how: str) -> None:
    with pytest.raises(RuntimeError, match="no op of the schedule's rows can run"):
        run(rows, Work(2), how)


@HOW
@pytest.mark.parametrize("seed", range(15))
def test_random_rows_are_done_in_order_whatever_fails(seed: int, how: str) -> None:
    rng = random.Random(seed)
    built = schedule.build(rng.choice(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"]), rng.choice([2, 4]),
                           rng.choice([4, 8]))
    workers = list(built.placement) if rng.random() < 0.7 else [0] * built.stages
    count = rng.choice([1, 2, 4, 7])
    rows = schedule_rows(built, workers, count, rng.random() < 0.8, rng.randrange(count + 1))
    ops = [op for row in rows for op in row]
    wrong = rng.choice(ops) if rng.random() < 0.5 else None
    error = rng.choice([ValueError, KeyboardInterrupt])

    def does(op: OpRun) -> None:
        if op == wrong:
            raise error

    work = Work(len(built.placement), does)
    try:
        run(rows, work, how)
        assert wrong is None and sorted(work.ended) == sorted(ops)
    except error:
        assert wrong is not None and wrong not in work.ended
    assert how != "caller" or {*work.threads.values()} == {threading.current_thread().name}
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
