"""Starts a search: building blocks with real durations, repeated at the shortest intervals that have room for them."""
from __future__ import annotations

import math
from random import Random

from splitpipe.schedule.search.problem import Problem, W, Word

_SLACK = 1e-9  # As a fraction of an interval; rounding errors are smaller.


def blocks(problem: Problem, tries: int, seed: int) -> list[list[Word]]:
    """The words of some repeated blocks that fit into memory, those with the shortest interval first."""
    random = Random(seed)
    interval, longest = problem.work or 1.0, math.inf
    results: list[list[Word]] = []
    while interval < longest:
        for attempt in range(tries):
            starts = _starts(problem, interval, random, 0.15 if attempt else 0.0)
            words = None if starts is None else _repeat(problem, starts, interval)
            if words is not None and words not in results and problem.fits(words):
                results.append(words)
                longest = min(longest, 1.3 * interval)
        interval *= 1.02
    return results


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
        before = start
        for began, length in busy:
            since = (start - began) % interval
            if interval - since < slack:
                since = 0.0
            if since < length - slack:
                start += length - since
            elif since + time > interval + slack:
                start += interval - since + length
        if start == before:
            return start
    return None


def _repeat(problem: Problem, starts: list[float], interval: float) -> list[Word]:
    words: list[Word] = [[] for _ in problem.caps]
    # Ops without duration may start at the same time, so the chain's order decides. Rounded times repeat exactly.
    chain, chunks = [*enumerate(problem.chain)], range(problem.chunks)
    for *_, letter in sorted((round(starts[x] / interval + k, 6), rank, x) for rank, x in chain for k in chunks):
        words[problem.device_of[letter]].append(letter)
    return words
