"""Rows of ops, one row a worker: those of a schedule, or of a drop-in call's two halves, for this batch.

Calls of one size share them, so nothing may change them.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.play import OpOrder


class OpRun(NamedTuple):
    """An op; several W of one stage, computed together; or R, the recomputation that comes before a B."""

    kind: Kind | Literal["R"]
    stage: int
    microbatches: tuple[int, ...]


OpRows = list[list[OpRun]]


@lru_cache
def forward_rows(microbatches: int, workers: tuple[int, ...]) -> OpRows:
    """The first half of a drop-in call: F in clock cycles, first stage first (torchgpipe, arXiv 2004.09910, 3.2)."""
    rows: OpRows = [[] for _ in range(max(workers) + 1)]
    for _, j, i in sorted([(i + j, j, i) for i in range(microbatches) for j in range(len(workers))]):
        rows[workers[j]].append(OpRun("F", j, (i,)))
    return rows


@lru_cache
def backward_rows(microbatches: int, workers: tuple[int, ...], lowest: int, checkpointed: int, weights: bool) -> OpRows:
    """The second half: R and B in the opposite order, down to stage ``lowest``, and W of what still waits."""
    rows: OpRows = []
    for forwards in forward_rows(microbatches, workers):
        rows.append([])
        for j, i in [(j, i) for _, j, (i,) in reversed(forwards) if j >= lowest]:
            rows[-1] += [OpRun("R", j, (i,))] if i < checkpointed else []
            rows[-1].append(OpRun("B", j, (i,)))
            if i == 0 and weights:  # After the stage's last B.
                rows[-1].append(OpRun("W", j, tuple(range(microbatches))))
    return rows


def schedule_rows(
    schedule: Schedule, workers: Sequence[int], microbatches: int, backward: bool = True, checkpointed: int = 0
) -> OpRows:
    """The rows of a schedule, for this number of its microbatches, of which the first ones are ``checkpointed``."""
    # Rows of one worker are merged, in the order in which a simulation starts their ops. All of them can run one after
    # another, so a worker never waits for itself.
    worker_of = {device: workers[stage] for stage, device in enumerate(schedule.placement)}
    schedule = first(schedule, microbatches)
    starts, _ = OpOrder(schedule).play(Costs())
    timed: list[list[tuple[float, int, Op]]] = [[] for _ in range(max(workers) + 1)]
    for device, (row, times) in enumerate(zip(schedule.rows, starts)):
        timed[worker_of.get(device, 0)] += [(time, device, op) for time, op in zip(times, row)]
    merged = [[op for _, _, op in sorted(row, key=lambda entry: entry[:2])] for row in timed]
    return [_runs([op for op in row if backward or op.kind == "F"], checkpointed) for row in merged]


def _runs(row: Iterable[Op], checkpointed: int) -> list[OpRun]:
    """The row's runs: consecutive W of a stage become one run."""
    runs: list[OpRun] = []
    for are_weights, ops in groupby(row, key=lambda op: op.kind == "W"):
        microbatches: dict[int, list[int]] = {}
        for op in ops:
            if are_weights:
                microbatches.setdefault(op.stage, []).append(op.microbatch)
                continue
            # R needs no gradient: a stage does it while it would wait for that.
            kinds = ["R", op.kind] if op.kind[0] == "B" and op.microbatch < checkpointed else [op.kind]
            runs += [OpRun(kind, op.stage, (op.microbatch,)) for kind in kinds]  # type: ignore[arg-type]
        runs += [OpRun("W", stage, tuple(numbers)) for stage, numbers in microbatches.items()]
    return runs
