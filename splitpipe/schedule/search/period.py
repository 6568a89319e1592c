"""The steady state of a schedule: what each device repeats, a period of one or a few microbatches.

    device 0    0F 1F 1B 1W 0B 0W | 0F 1F 1B 1W 0B 0W | ...      lags  0F: 0, 1F: 1, 1B: 1, 1W: 1, 0B: 2, 0W: 2

In period j, a letter with lag 2 belongs to microbatch j - 2. Order and lags define everything: simulating them shows
how long a period takes, and how long all microbatches take.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from splitpipe.schedule.search.word import F, Problem, W, Word, ends, latest, peak

_SLOWER = 4  # The cost of simulating an op here, relative to looking at an op elsewhere in the search.


@dataclass(frozen=True)
class Period:
    """The steady state of a schedule."""

    rows: tuple[tuple[int, ...], ...]  # The letters of each device, each as often as the period has microbatches.
    lags: tuple[int, ...]  # The lag of each letter, in microbatches. The smallest on each device is 0.
    size: int = 1  # Number of microbatches.

    def times(self, number: int) -> Period:
        """The same as a period of ``number`` times as many microbatches."""
        return replace(self, rows=tuple(row * number for row in self.rows), size=self.size * number)

    def full(self, chunks: int) -> list[range]:
        """The complete periods of each device."""
        return [
            range(-(-max(self.lags[letter] for letter in row) // self.size), chunks // self.size) for row in self.rows
        ]

    def unrolled(self, chunks: int) -> list[Word]:
        """The words of ``chunks`` microbatches: whole periods, and parts of periods at both ends."""
        return [[letter for part in self.parts(row, chunks) for letter in part] for row in self.rows]

    def parts(self, row: Sequence[int], chunks: int) -> list[Word]:
        """The letters of one device for ``chunks`` microbatches: one word per period."""
        seen = {letter: -self.lags[letter] for letter in row}
        parts: list[Word] = []
        for _ in range(-(-(chunks + max(self.lags[letter] for letter in row)) // self.size)):
            parts.append([])
            for letter in row:
                if 0 <= seen[letter] < chunks:
                    parts[-1].append(letter)
                seen[letter] += 1
        return parts


def alive(row: Sequence[int], lags: Sequence[int]) -> int:
    """The most activations that are alive at once in a device's period."""
    letters = set(row)
    before = sum(lags[x] for x in letters if x % 3 == W) - sum(lags[x] for x in letters if x % 3 == F)
    return peak(row, before)


def fits(problem: Problem, period: Period) -> bool:
    """True if there is enough memory for the period."""
    return all(alive(row, period.lags) <= cap for row, cap in zip(period.rows, problem.caps))


def sample(problem: Problem, size: int) -> int:
    """The number of microbatches that must be simulated to show the time of a period."""
    return min(problem.chunks, 2 * problem.devices + 2 * size + 2)


def played(
    problem: Problem, rows: Sequence[Sequence[int]], lags: Sequence[int], size: int
) -> tuple[float, float]:
    """The time of all microbatches, and of one more, estimated from some; infinite if devices wait for each other."""
    chunks = sample(problem, size)
    ended = ends(problem, Period(tuple(map(tuple, rows)), tuple(lags), size).unrolled(chunks))
    if ended is None:
        return math.inf, math.inf
    apart = min(chunks - 1, max(size, chunks // 2 // size * size))
    each = max(each[-1] - each[-1 - apart] for each in ended) / apart if apart else 0.0
    return latest(problem, ended) + (problem.chunks - chunks) * each, each


def improved(problem: Problem, period: Period, work: int, seed: int, heat: float = 0.03) -> tuple[float, Period]:
    """Swaps neighbours in the rows, sometimes for the worse, more rarely as it cools: simulated annealing.

    ``work``: how many ops may be simulated; ``heat``: the initial temperature, in mean op times per microbatch.
    """
    random = Random(seed)
    rows, lags = [list(row) for row in period.rows], list(period.lags)
    now = least = played(problem, rows, lags, period.size)[0]
    best = period
    steps = work // (_SLOWER * sample(problem, period.size) * len(problem.device_of))
    hot = heat * problem.pace * problem.chunks or 1.0
    movable = [device for device, row in enumerate(rows) if len(set(row)) > 1]
    for step in range(steps):
        device = movable[random.randrange(len(movable))]
        row = rows[device]
        at = random.randrange(len(row))
        kept = None
        new = list(row)
        if at + 1 == len(row):  # Across the boundary: the last letter becomes the next period's first.
            kept = list(lags)
            new.insert(0, new.pop())
            lags[new[0]] += 1
            at = 0
        if _swap(problem, new, lags, at, problem.caps[device]):
            rows[device] = new
            found = played(problem, rows, lags, period.size)[0]
            if found <= now or random.random() < math.exp((now - found) / (hot * 0.2 ** (step / steps))):
                now = found
                if kept is not None:
                    low = min(lags[letter] for letter in new)
                    for letter in set(new):
                        lags[letter] -= low
                if found < least - 1e-9 * least:
                    least, best = found, Period(tuple(map(tuple, rows)), tuple(lags), period.size)
                continue
            rows[device] = row
        if kept is not None:
            lags = kept
    return least, best


def _swap(problem: Problem, row: Word, lags: Sequence[int], at: int, cap: int) -> bool:
    """Swaps two neighbours of a row if that is allowed."""
    a, b = row[at], row[at + 1]
    if a == b:
        return False
    if (a, b) in problem.tied and row[:at].count(a) - lags[a] == row[:at].count(b) - lags[b]:
        return False
    row[at], row[at + 1] = b, a
    return a % 3 != W or b % 3 != F or alive(row, lags) <= cap
