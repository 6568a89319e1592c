"""Searches for good periods: building blocks with real durations, improved; then periods of several microbatches.

A block specifies when the ops of one microbatch start, so that it can be repeated every period.
"""
from __future__ import annotations

import math
from operator import itemgetter
from random import Random

from splitpipe.schedule.search.period import Period, fits, improved, played, sample
from splitpipe.schedule.search.word import Problem, W

#: Roughly the time that all microbatches take, and the period.
Rated = tuple[float, Period]
_SLACK = 1e-9  # As a fraction of a period; rounding errors are smaller.


def periods(problem: Problem, work: int) -> list[Rated]:
    """Periods that fit, with their estimated spans, shortest first."""
    each = sample(problem, 1) * len(problem.device_of)
    starts = [
        (played(problem, period.rows, period.lags, 1)[0], period)
        for _, period in blocks(problem, tries=max(1, min(30, work // (20 * each))), seed=0)
    ]
    starts = sorted((rated for rated in starts if rated[0] < math.inf), key=itemgetter(0))
    found = [
        improved(problem, period, work // 10, seed, heat)
        for seed, ((_, period), heat) in enumerate(zip(starts, (0.03, 0.1, 0.1)))
    ]
    found.sort(key=itemgetter(0))
    # Periods of two and three microbatches, from the best ones of one.
    sizes = [size for size in (2, 3) if 2 * size <= problem.chunks]
    found += [
        improved(problem, period.times(size), work * 7 // 10 // (len(sizes) * len(found[:2])), seed, heat=0.02)
        for seed, (_, period) in enumerate(found[:2])
        for size in sizes
    ]
    return sorted(found, key=itemgetter(0))


def blocks(problem: Problem, tries: int, seed: int) -> list[tuple[float, Period]]:
    """Some periods that fit into memory, each with the time between two microbatches' starts, shortest first."""
    random = Random(seed)
    interval = problem.work or 1.0
    found: list[tuple[float, Period]] = []
    seen: set[Period] = set()
    longest = math.inf
    while interval < longest:
        for attempt in range(tries):
            starts = _starts(problem, interval, random, 0.15 if attempt else 0.0)
            if starts is None:
                continue
            period = repeated(problem, starts, interval)
            if period not in seen and fits(problem, period):
                seen.add(period)
                found.append((interval, period))
                longest = min(longest, 1.3 * interval)
        interval *= 1.02
    return found


def _starts(problem: Problem, interval: float, random: Random, late: float) -> list[float] | None:
    """The starts of a microbatch's ops: each as early as possible without a collision, some randomly later."""
    starts = [0.0] * len(problem.chain)
    busy: list[list[tuple[float, float]]] = [[] for _ in problem.caps]
    for letter in problem.chain:
        device, time = problem.device_of[letter], problem.times[letter]
        earliest = 0.0
        for need in problem.needs[letter]:
            hop = problem.costs.hop if problem.device_of[need] != device else 0.0
            earliest = max(earliest, starts[need] + problem.times[need] + hop)
        if letter % 3 != W and random.random() < late:
            earliest += random.choice((0.5, 1.0, 1.5)) * time
        start = _free(busy[device], earliest, time, interval)
        if start is None:
            return None
        starts[letter] = start
        busy[device].append((start % interval, time))
    return starts


def _free(busy: list[tuple[float, float]], start: float, time: float, interval: float) -> float | None:
    """The first start, not before the given one, at which a device is free for ``time``, modulo the interval."""
    last, slack = start + interval * (1 + _SLACK), interval * _SLACK
    while start < last:
        moved = False
        for began, length in busy:
            since = (start - began) % interval
            if interval - since < slack:
                since = 0.0
            if since < length - slack:
                start += length - since
                moved = True
            elif since + time > interval + slack:
                start += interval - since + length
                moved = True
        if not moved:
            return start
    return None


def repeated(problem: Problem, starts: list[float], interval: float) -> Period:
    """The period that results from repeating a microbatch."""
    rows = []
    lags = [0] * len(starts)
    for letters in problem.letters:
        origin = starts[letters[0]] - interval * _SLACK
        placed = []
        for rank, letter in enumerate(problem.chain):  # Ops without duration may start at the same time.
            if letter in letters:
                lag, phase = divmod(starts[letter] - origin, interval)
                lags[letter] = int(lag)
                placed.append((phase, phase + problem.times[letter], rank, letter))
        rows.append(tuple(letter for *_, letter in sorted(placed)))
    return Period(tuple(rows), tuple(lags))
