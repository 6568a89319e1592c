"""A schedule as words, one per device: lists of letters, each a kind of op in one stage.

A letter is a number: 3 * stage for F, one more for B, two more for W. All microbatches are alike, so each stage may run
them in order: a letter's n-th occurrence is the op of microbatch n. The backward is always split.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from splitpipe.schedule.bounds import bounds
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule

Word = list[int]
F, B, W = range(3)
KINDS: tuple[Kind, ...] = ("F", "B", "W")


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
        """The number of devices."""
        return len(self.caps)

    @cached_property
    def device_of(self) -> list[int]:
        """The device of each letter."""
        return [device for device in self.placement for _ in KINDS]

    @cached_property
    def times(self) -> list[float]:
        """The time of each letter."""
        times = self.costs.times(Schedule([()] * self.devices, self.placement))
        return [times[kind][stage] for stage in range(len(self.placement)) for kind in KINDS]

    @cached_property
    def letters(self) -> list[list[int]]:
        """The letters of each device."""
        return [[letter for letter, at in enumerate(self.device_of) if at == d] for d in range(self.devices)]

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each letter, those that come before it in a microbatch."""
        found: list[list[int]] = []
        for letter in range(len(self.device_of)):
            kind = letter % 3
            before = [letter - 1] if kind else [letter - 3] if letter else []
            found.append(before + ([letter + 3] if kind == B and letter + 3 < len(self.device_of) else []))
        return found

    @cached_property
    def chain(self) -> list[int]:
        """All letters, in the order in which a lone microbatch runs them: each after those that it needs."""
        stages = range(len(self.placement))
        return [3 * stage for stage in stages] + [3 * stage + part for stage in reversed(stages) for part in (B, W)]

    @cached_property
    def remote_need(self) -> list[int]:
        """For each letter, the one that it waits for on another device, or else -1."""
        return [
            next((need for need in needs if self.device_of[need] != self.device_of[letter]), -1)
            for letter, needs in enumerate(self.needs)
        ]

    @cached_property
    def tied(self) -> set[tuple[int, int]]:
        """Pairs of letters on one device of which, in one microbatch, the second needs the first."""
        return {(a, b) for b, needs in enumerate(self.needs) for a in needs if self.device_of[a] == self.device_of[b]}

    @cached_property
    def work(self) -> float:
        """The time per microbatch of the device with the most work."""
        return max(sum(self.times[letter] for letter in letters) for letters in self.letters)

    @cached_property
    def goal(self) -> float:
        """A lower bound for the span of any schedule."""
        plain = [[letter for letter in letters for _ in range(self.chunks)] for letters in self.letters]
        cap = [stages * 3 / len(letters) for stages, letters in zip(self.caps, self.letters)]
        found = bounds(schedule_of(self, plain), self.costs, cap)
        return max(found["work"], found["memory"]) if self.longest else max(found.values())

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

    @cached_property
    def pace(self) -> float:
        """The mean time of an op, in which the search measures changes."""
        return sum(self.times) / len(self.times)


def schedule_of(problem: Problem, words: Iterable[Word], name: str = "") -> Schedule:
    """The schedule that consists of these words."""
    return Schedule([_row(word, [0] * len(problem.device_of)) for word in words], problem.placement, name)


def _row(word: Word, seen: list[int]) -> Iterator[Op]:
    for letter in word:
        yield Op(KINDS[letter % 3], letter // 3, seen[letter])
        seen[letter] += 1


def words_of(schedule: Schedule) -> list[Word]:
    """The words of a schedule. A BW becomes B and W, which takes no longer."""
    parts = {"F": [F], "B": [B], "W": [W], "BW": [B, W]}
    return [[3 * op.stage + part for op in row for part in parts[op.kind]] for row in schedule.rows]


def peak(word: Sequence[int], alive: int = 0) -> int:
    """The most activations that are alive at once, if ``alive`` are at the start."""
    most = 0
    for letter in word:
        if letter % 3 == F:
            alive += 1
            most = max(most, alive)
        elif letter % 3 == W:
            alive -= 1
    return most


def ends(problem: Problem, words: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """The end of each occurrence of each letter, if all start as early as possible; None in a deadlock."""
    remote_need, times, copy = problem.remote_need, problem.times, problem.costs.hop
    ended: list[list[float]] = [[] for _ in times]
    waits: list[Any] = [None] * len(times)  # The device that waits for a letter.
    at, free, ready = [0] * len(words), [0.0] * len(words), list(range(len(words)))
    while ready:
        device = ready.pop()
        word, now, position = words[device], free[device], at[device]
        while position < len(word):
            letter = word[position]
            other = remote_need[letter]
            if other >= 0:
                before, seen = ended[other], len(ended[letter])
                if len(before) <= seen:
                    waits[other] = device
                    break
                if before[seen] + copy > now:
                    now = before[seen] + copy
            now += times[letter]
            ended[letter].append(now)
            position += 1
            if waits[letter] is not None:
                ready.append(waits[letter])
                waits[letter] = None
        at[device], free[device] = position, now
    return None if any(position < len(word) for position, word in zip(at, words)) else ended


def length(problem: Problem, words: Sequence[Sequence[int]]) -> float:
    """The makespan, or the longest span of a device; infinite in a deadlock."""
    ended = ends(problem, words)
    return math.inf if ended is None else latest(problem, ended)


def latest(problem: Problem, ended: Sequence[Sequence[float]]) -> float:
    """The makespan, or the longest span of a device, from the ends of each letter."""
    return max(each[-1] - problem.heads[device] for each, device in zip(ended, problem.device_of))
