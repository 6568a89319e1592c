"""The rows of each worker in one call: a schedule's, without the microbatches that the batch did not give.

Rows of one worker (stages of one accelerator, or that share a buffer) become one, in the order in which a simulation
starts their ops: an order in which all of them can run, one after the other, so that a worker never waits for itself.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.play import play


class OpRun(NamedTuple):
    """One or, for W, several passes through one stage.

    Attributes:
        kind: as an op's.
        stage: that it goes through.
        microbatches: one, or those whose W are computed together.
    """

    kind: Kind
    stage: int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(str(Op(self.kind, self.stage, microbatch)) for microbatch in self.microbatches)


def rows_of(schedule: Schedule, workers: Sequence[int], microbatches: int, backward: bool) -> list[list[OpRun]]:
    """The steps of each worker.

    Args:
        schedule: with at least so many microbatches.
        workers: the worker of each row.
        microbatches: how many the batch gave.
        backward: whether there is a backward; else only F.
    """
    rows = _rows(first(schedule, microbatches), workers)
    return [_runs([op for op in row if backward or op.kind == "F"]) for row in rows]


def _rows(schedule: Schedule, workers: Sequence[int]) -> list[Sequence[Op]]:
    """The ops of each worker."""
    if len(set(workers)) == len(workers):
        return [schedule.rows[workers.index(worker)] for worker in range(len(workers))]
    starts, _ = play(schedule, Costs().times(schedule))
    timed: list[list[tuple[float, int, Op]]] = [[] for _ in range(max(workers) + 1)]
    for device, (row, times) in enumerate(zip(schedule.rows, starts)):
        timed[workers[device]] += [(time, device, op) for time, op in zip(times, row)]
    return [[op for _, _, op in sorted(row, key=lambda entry: entry[:2])] for row in timed]


def _runs(row: Sequence[Op]) -> list[OpRun]:
    """The row, with the W that follow each other made one for each stage."""
    found: list[OpRun] = []
    run: dict[int, list[int]] = {}
    for op in [*row, None]:
        if op is not None and op.kind == "W":
            run.setdefault(op.stage, []).append(op.microbatch)
            continue
        found += [OpRun("W", stage, tuple(numbers)) for stage, numbers in run.items()]
        run = {}
        if op is not None:
            found.append(OpRun(op.kind, op.stage, (op.microbatch,)))
    return found
