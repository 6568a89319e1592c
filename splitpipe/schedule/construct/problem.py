"""What a search works on: a problem, and words, one per device.

A word lists letters, each a kind of op in one stage: 3 * stage for F, one more for B, two more for W. All microbatches
are alike, so each stage may run them in order: a letter's n-th occurrence is the op of microbatch n. The backward is
always split.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count

from splitpipe.schedule.bounds import bounds
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule, dependencies

Word = list[int]
F, B, W = range(3)
KINDS: tuple[Kind, ...] = ("F", "B", "W")
CHANGES = (1, 0, -1)  # What each kind adds to the number of activations.


@dataclass(frozen=True)
class Problem:
    """Stages on devices, microbatches, costs and memory, for which to find a schedule."""

    placement: tuple[int, ...]  # The device of each stage.
    chunks: int  # Number of microbatches.
    costs: Costs
    caps: tuple[int, ...]  # For each device, how many of its stages' activations may be alive at once.
    longest: bool = False  # Whether to minimise the longest span of a device instead of the makespan.

    @property
    def devices(self) -> int:
        return len(self.caps)

    @cached_property
    def device_of(self) -> list[int]:
        return [device for device in self.placement for _ in KINDS]

    @cached_property
    def times(self) -> list[float]:
        times = self.costs.times(Schedule([()] * self.devices, self.placement))
        return [times[kind][stage] for stage in range(len(self.placement)) for kind in KINDS]

    @cached_property
    def letters(self) -> list[list[int]]:
        return [[letter for letter, at in enumerate(self.device_of) if at == d] for d in range(self.devices)]

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each letter, those that come before it in a microbatch."""
        stages, letters = len(self.placement), range(len(self.device_of))
        ops = [dependencies(Op(KINDS[letter % 3], letter // 3, 0), stages) for letter in letters]
        return [[3 * need.stage + KINDS.index(need.kind) for need in each] for each in ops]

    @cached_property
    def chain(self) -> list[int]:
        """All letters, in the order in which a lone microbatch runs them: each after those that it needs."""
        firsts = range(0, 3 * len(self.placement), 3)
        return [*firsts, *(first + kind for first in reversed(firsts) for kind in (B, W))]

    @cached_property
    def work(self) -> float:
        """The time per microbatch of the device with the most work."""
        return max(sum(self.times[letter] for letter in letters) for letters in self.letters)

    @cached_property
    def goal(self) -> float:
        """A lower bound for the span of any schedule."""
        plain = [[letter for letter in letters for _ in range(self.chunks)] for letters in self.letters]
        cap = [stages * 3 / len(letters) for stages, letters in zip(self.caps, self.letters)]
        limits = bounds(schedule_of(self, plain), self.costs, cap)
        return max(limits["work"], limits["memory"]) if self.longest else max(limits.values())

    @cached_property
    def heads(self) -> list[float]:
        """For each device, the time at which its span starts: for the longest span, the start of its first op."""
        if not self.longest:
            return [0.0] * self.devices
        # The first op is F of the first microbatch in the device's first stage, as early as possible.
        heads: list[float] = [math.inf] * self.devices
        start, previous = 0.0, self.placement[0]
        for stage, device in enumerate(self.placement):
            start += self.costs.hop if device != previous else 0.0
            heads[device] = min(heads[device], start)
            start, previous = start + self.times[3 * stage], device
        return heads

    def fits(self, words: Iterable[Word]) -> bool:
        peaks = [max(accumulate(CHANGES[letter % 3] for letter in word), default=0) for word in words]
        return all(peak <= cap for peak, cap in zip(peaks, self.caps))


def schedule_of(problem: Problem, words: Iterable[Word], name: str = "") -> Schedule:
    numbers = [count() for _ in problem.device_of]
    rows = [[Op(KINDS[letter % 3], letter // 3, next(numbers[letter])) for letter in word] for word in words]
    return Schedule(rows, problem.placement, name)


def words_of(schedule: Schedule) -> list[Word]:
    """The words of a schedule. A BW becomes B and W, which takes no longer."""
    parts = {"F": [F], "B": [B], "W": [W], "BW": [B, W]}
    return [[3 * op.stage + part for op in row for part in parts[op.kind]] for row in schedule.rows]


def shorten(problem: Problem, size: int) -> tuple[Problem, int]:
    """The problem with fewer microbatches, if it has many, and the number of those left out, in periods of ``size``.

    Two microbatches per device remain, and a few.
    """
    more = max(0, problem.chunks - 2 * problem.devices - 2 * size - 2) // size * size
    return replace(problem, chunks=problem.chunks - more), more


def lengthen(problem: Problem, words: Sequence[Word], more: int, size: int) -> list[Word]:
    """Words of ``more`` microbatches in addition: the period in the middle, of ``size`` of them, is repeated."""
    results = []
    for word, letters in zip(words, problem.letters):
        start = (len(word) - size * len(letters)) // 2
        results.append(word[:start] + word[start : start + size * len(letters)] * (more // size) + word[start:])
    return results
