"""What each worker does: a schedule's rows, without what the batch did not give, W that follow each other made one."""
from __future__ import annotations

from collections import Counter

import pytest

from splitpipe import schedule
from splitpipe.schedule.op import Op, needed
from splitpipe.training.op_rows import OpRun, rows_of

NAMES = pytest.mark.parametrize("name", schedule.names())


def ops(steps: list[OpRun]) -> list[Op]:
    return [Op(step.kind, step.stage, number) for step in steps for number in step.microbatches]


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
