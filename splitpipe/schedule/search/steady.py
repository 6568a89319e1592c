"""Finds good periods: blocks first, improved; then the best of them as periods of two and three microbatches."""
from __future__ import annotations

import math
from collections.abc import Sequence

from splitpipe.schedule.search.offsets import blocks
from splitpipe.schedule.search.period import Period, improved, played, sample
from splitpipe.schedule.search.word import Problem

Rated = tuple[float, Period]


def periods(problem: Problem, work: int) -> list[Rated]:
    """Periods that fit, with the estimated span, shortest first.

    Args:
        problem: to solve.
        work: how many ops may be played.
    """
    each = sample(problem, 1) * len(problem.place)
    starts = [
        (played(problem, period.rows, period.lags, 1)[0], period)
        for _, period in blocks(problem, tries=max(1, min(30, work // (20 * each))), seed=0)
    ]
    starts = sorted((rated for rated in starts if rated[0] < math.inf), key=_value)
    found = [
        improved(problem, period, work // 10, seed, heat)
        for seed, ((_, period), heat) in enumerate(zip(starts, (0.03, 0.1, 0.1)))
    ]
    found.sort(key=_value)
    return sorted(found + longer(problem, found[:2], work * 7 // 10), key=_value)


def longer(problem: Problem, rated: Sequence[Rated], work: int) -> list[Rated]:
    """Periods of two and three microbatches, from some of one."""
    sizes = [size for size in (2, 3) if 2 * size <= problem.chunks]
    return [
        improved(problem, period.times(size), work // (len(sizes) * len(rated)), seed, heat=0.02)
        for seed, (_, period) in enumerate(rated)
        for size in sizes
    ]


def _value(rated: Rated) -> float:
    return rated[0]
