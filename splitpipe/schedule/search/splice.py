"""A whole schedule from a period: a short one is tightened at both ends, then whole periods go into its middle."""
from __future__ import annotations

from dataclasses import replace

from splitpipe.schedule.search.period import Period
from splitpipe.schedule.search.tighten import tightened
from splitpipe.schedule.search.word import Problem, Word, length

_KEPT = 2  # Periods that stay as they are, on each device.


def finished(problem: Problem, period: Period, work: int, seed: int, goal: float = 0.0) -> tuple[float, list[Word]]:
    """Span and words of all microbatches."""
    whole = period.unrolled(problem.chunks)
    lead = max(each.start for each in period.full(problem.chunks))
    free = problem.devices // period.size + 1  # Full periods at each end that may change.
    chunks = (lead + _KEPT + 2 * free) * period.size + problem.chunks % period.size
    if chunks >= problem.chunks:
        return tightened(problem, whole, work, seed, goal)
    short = replace(problem, chunks=chunks)
    words, fixed = [], []
    for row, full in zip(period.rows, period.full(chunks)):
        parts = period.parts(row, chunks)
        first = full.start + (len(full) - _KEPT) // 2
        start = sum(map(len, parts[:first]))
        words.append([letter for part in parts for letter in part])
        fixed.append(range(start, start + _KEPT * len(row)))
    _, tight = tightened(short, words, work, seed, fixed=fixed)
    more = (problem.chunks - chunks) // period.size
    spliced = [
        word[: kept.start] + list(row) * more + word[kept.start :] for word, kept, row in zip(tight, fixed, period.rows)
    ]
    return min(((length(problem, words), words) for words in (whole, spliced)), key=lambda found: found[0])
