"""Many repetitions of a block, reordered fast: few are reordered, then what their steady part repeats is put in more.

How a pipeline fills and how it empties has nothing to do with how many microbatches go through it.
"""
from __future__ import annotations

from splitpipe.schedule.construct.block import NEAR, BuildingBlock
from splitpipe.schedule.construct.tiling import Tiling
from splitpipe.schedule.op import Op


def repeated(block: BuildingBlock, chunks: int, level: bool = False) -> Tiling:
    """The block repeated, squeezed and reordered."""
    size = block.microbatches
    enough = 3 * (1 + max(block.placement)) + 2 * size
    more = max(0, (chunks - enough) // size)
    short = _reordered(block, chunks - more * size, level)
    if not more:
        return short
    long = _with_more(short, size, more)
    if long is None or abs(long.makespan - short.makespan - more * block.interval) > NEAR * long.makespan:
        return _reordered(block, chunks, level)
    return long


def _reordered(block: BuildingBlock, chunks: int, level: bool) -> Tiling:
    tiling = block.repeat(chunks).squeeze()
    return tiling.reorder(max(tiling.peak_activations) if level else 0)


def _with_more(tiling: Tiling, size: int, more: int) -> Tiling | None:
    """With so many more periods, each of ``size`` microbatches; None if some device has no steady part."""
    rows = []
    for row in tiling.rows:
        period = len(row) * size // tiling.microbatches
        start = _steady(row, size, period)
        if start is None:
            return None
        first = [_later(op, n * size) for n in range(more) for op in row[start : start + period]]
        rows.append([*row[:start], *first, *(_later(op, more * size) for op in row[start:])])
    return Tiling(rows, tiling.placement, (), tiling.costs).squeeze()


def _steady(row: tuple[Op, ...], size: int, period: int) -> int | None:
    """Where a period starts after which the next one is the same; if there is a choice, just before the middle."""
    found = None
    same = 0
    for place, (op, other) in enumerate(zip(row, row[period:]), start=1):
        same = same + 1 if other == _later(op, size) else 0
        if same >= period and (found is None or place <= len(row) // 2):
            found = place - period
    return found


def _later(op: Op, microbatches: int) -> Op:
    return Op(op.kind, op.stage, op.microbatch + microbatches)
