"""What each worker does: a schedule's rows, without what the batch did not give, W that follow each other made one."""
from __future__ import annotations

import itertools
from collections import Counter

import pytest

from splitpipe import schedule
from splitpipe.schedule.op import Op, needed
from splitpipe.training.op_rows import OpRun, rows_of

NAMES = pytest.mark.parametrize("name", schedule.names())


def ops(steps: list[OpRun]) -> list[Op]:
    return [Op(step.kind, step.stage, number) for step in steps for number in step.microbatches]


def text(steps: list[OpRun]) -> str:
    return ", ".join(map(str, steps))


@NAMES
@pytest.mark.parametrize(("backward", "microbatches"), [(True, 8), (True, 3), (False, 8)])
def test_each_worker_walks_its_row(name: str, backward: bool, microbatches: int) -> None:
    """Without what the batch did not give; runs of W are each where the row has them, in some order."""
    built = schedule.build(name, 4, 8)
    for row, steps in zip(built.rows, rows_of(built, range(4), microbatches, backward)):
        wanted = [op for op in row if op.microbatch < microbatches and (backward or op.kind == "F")]
        found = ops(steps)
        assert [op if op.kind != "W" else None for op in found] == [op if op.kind != "W" else None for op in wanted]
        for is_w, run in itertools.groupby(zip(found, wanted), lambda pair: pair[0].kind == "W"):
            pairs = list(run)
            assert not is_w or sorted(op for op, _ in pairs) == sorted(op for _, op in pairs)


def test_a_row_goes_to_its_worker_wherever_it_stands() -> None:
    built = schedule.build("1f1b", 3, 4)
    rows = rows_of(built, [2, 0, 1], 4, True)
    assert [{step.stage for step in steps} for steps in rows] == [{1}, {2}, {0}]


def test_w_that_follow_each_other_are_one_step_for_each_stage() -> None:
    row = [Op(kind, stage, number) for kind, stage, number in
           [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0), ("W", 1, 0), ("W", 0, 0)]]  # type: ignore[arg-type]
    two = [Op(op.kind, op.stage, number) for number in (0, 1) for op in row]
    two = [op for op in two if op.kind != "W"] + [op for op in two if op.kind == "W"]
    (steps,) = rows_of(schedule.Schedule([two], [0, 0]), [0], 2, True)
    assert text(steps[-2:]) == "1W0 1W1, 0W0 0W1"


@NAMES
@pytest.mark.parametrize("workers", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
def test_rows_of_one_worker_become_one_that_can_run_in_its_order(name: str, workers: list[int]) -> None:
    built = schedule.build(name, 4, 8)
    merged = rows_of(built, workers, 8, True)
    assert len(merged) == max(workers) + 1
    assert Counter(op for steps in merged for op in ops(steps)) == Counter(op for row in built.rows for op in row)
    done: set[Op] = set()
    rows = [ops(steps) for steps in merged]
    while any(rows):  # Each worker goes on as far as it can.
        before = len(done)
        for row in rows:
            while row and all(met(op, done) for op in needed(row[0], built.stages)):
                done.add(row.pop(0))
        assert len(done) > before, "workers wait for each other"


def met(op: Op, done: set[Op]) -> bool:
    return op in done or op.kind == "B" and Op("BW", op.stage, op.microbatch) in done
