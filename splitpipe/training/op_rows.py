"""The rows of ops of a step: those of a schedule, adapted to the workers and the number of microbatches."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from splitpipe.core.thread_state import State
from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.play import play


class OpRun(NamedTuple):
    """An op; several W of one stage, computed together; or R, the recomputation with which a B begins."""

    kind: Kind | Literal["R"]
    stage: int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        kind = "B" if self.kind == "R" else self.kind
        return " ".join(str(Op(kind, self.stage, microbatch)) for microbatch in self.microbatches)


def rows_of(
    schedule: Schedule, workers: Sequence[int], microbatches: int, backward: bool = True, checkpointed: int = 0
) -> list[list[OpRun]]:
    """The row of each worker.

    Args:
        schedule: that of all microbatches.
        workers: one per row of the schedule.
        microbatches: how many of the schedule's microbatches there are.
        backward: whether there is a backward; otherwise, there are only F.
        checkpointed: how many microbatches, from the first, are recomputed.
    """
    rows = _rows(first(schedule, microbatches), workers)
    runs = [_runs([op for op in row if backward or op.kind == "F"]) for row in rows]
    return [[each for run in row for each in _with_recomputation(run, checkpointed)] for row in runs]


def _with_recomputation(run: OpRun, checkpointed: int) -> list[OpRun]:
    # It needs no gradient: a stage does it while it would wait for that.
    again = run.kind[0] == "B" and run.microbatches[0] < checkpointed
    return [OpRun("R", run.stage, run.microbatches), run] if again else [run]


def _rows(schedule: Schedule, workers: Sequence[int]) -> list[Sequence[Op]]:
    if len(set(workers)) == len(workers):
        return [schedule.rows[workers.index(worker)] for worker in range(len(workers))]
    # Rows of one worker are merged, in the order in which a simulation starts their ops. All of them can run one after
    # another, so a worker never waits for itself.
    starts, _ = play(schedule, Costs().times(schedule))
    timed: list[list[tuple[float, int, Op]]] = [[] for _ in range(max(workers) + 1)]
    for device, (row, times) in enumerate(zip(schedule.rows, starts)):
        timed[workers[device]] += [(time, device, op) for time, op in zip(times, row)]
    return [[op for _, _, op in sorted(row, key=lambda entry: entry[:2])] for row in timed]


def _runs(row: Sequence[Op]) -> list[OpRun]:
    """The row's runs: consecutive W of a stage become one run."""
    found: list[OpRun] = []
    for are_weights, ops in groupby(row, key=lambda op: op.kind == "W"):
        if not are_weights:
            found += [OpRun(op.kind, op.stage, (op.microbatch,)) for op in ops]
            continue
        microbatches: dict[int, list[int]] = {}
        for op in ops:
            microbatches.setdefault(op.stage, []).append(op.microbatch)
        found += [OpRun("W", stage, tuple(numbers)) for stage, numbers in microbatches.items()]
    return found


class Execution(NamedTuple):
    """The rows of ops of one call, and the thread-local state around them; ``done``: called by the last thread."""

    rows: Sequence[Sequence[OpRun]]
    around: State
    done: Callable[[], None]
