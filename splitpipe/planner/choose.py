"""Chooses cuts, devices, schedule, microbatches and checkpointing together, by simulation, within each device's memory.

Every candidate is tried with the cuts that balance its stages' times, or their memory; then the most promising ones are
improved, one boundary at a time. Choices are compared by missing bytes first, then by the time of a step.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from splitpipe.planner.costs import Candidate, Cuts, LayerSums, StageBytes, candidates, costs, memory
from splitpipe.planner.measure import Device, Profile
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Schedule

_IMPROVED, _TRIES = 24, 100  # The number of candidates whose cuts are improved, and of cuts that are tried for each.
_NEAR = 0.01  # Times are equal if they differ by a smaller fraction: predictions aren't more accurate.


@dataclass(frozen=True)
class Choice:
    """One candidate on some devices, one per row of its schedule, with its best cuts."""

    candidate: Candidate
    devices: tuple[Device, ...]
    cuts: Cuts
    costs: Costs  # The times of its stages, in milliseconds.
    time: float  # One step, in milliseconds.
    memory: tuple[float, ...]  # The most bytes on each device.
    missing: tuple[float, ...]  # The bytes that each device lacks.

    @property
    def balance(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.cuts, self.cuts[1:]))

    @property
    def rank(self) -> tuple[float, ...]:
        """The key by which choices are compared; smaller is better."""
        return max(self.missing), sum(self.missing), self.time

    @property
    def fits(self) -> bool:
        return not any(self.missing)


def choose(
    profile: Profile, schedules: Sequence[str | Schedule] | None = None, dropin: bool = False, tries: int = _TRIES
) -> list[Choice]:
    """The best choice of each candidate: first those that fit, by time, then others. Empty for too few layers."""
    sums = {count: LayerSums(profile, count) for count in profile.layers}
    searches: list[_Search] = []
    least = math.inf
    for devices in _groups(profile):
        chosen = candidates(len(devices), [*profile.layers], schedules, dropin)
        own = [_Search(profile, candidate, devices, sums[candidate.chunks]) for candidate in chosen]
        best = min([search.best.time for search in own if search.best and search.best.fits], default=math.inf)
        searches += own
        if best > least * (1 + _NEAR):
            break  # Even fewer devices wouldn't help.
        least = min(least, best)
    for search in sorted(searches, key=_Search.rank)[:_IMPROVED]:
        search.improve(tries)
    best_of: dict[str, Choice] = {}
    for search in sorted(searches, key=_Search.rank):
        if search.best is not None:
            best_of.setdefault(str(search.candidate), search.best)
    found = [*best_of.values()]
    # Of those as good as the best, the simplest comes first: of the fewest stages, then of the least memory.
    good = [each for each in found if each.fits and each.time <= found[0].time * (1 + _NEAR)]
    if good:
        simple = min(good, key=lambda each: (len(each.cuts), max(each.memory), each.time))
        found.sort(key=lambda each: each is not simple)
    return found


def _groups(profile: Profile) -> Iterator[tuple[Device, ...]]:
    """All devices, then those with the most memory, one less each time. Threads of a CPU are all used."""
    roomy = sorted(profile.devices, key=lambda device: -device.memory)
    for count in range(len(roomy), 0 if profile.own_compute else len(roomy) - 1, -1):
        yield tuple(sorted(roomy[:count], key=profile.devices.index))


class _Search:
    def __init__(self, profile: Profile, candidate: Candidate, devices: tuple[Device, ...], sums: LayerSums) -> None:
        self.candidate = candidate
        self.best: Choice | None = None
        self._profile, self._devices, self._sums = profile, devices, sums
        self._seen: set[Cuts] = set()
        layers = range(len(profile.names) + 1)
        together = [at for at in layers if not any(one < at <= two for one, two in profile.tied)]
        for grid in (layers, together) if profile.own_compute and profile.tied else (layers,):
            self._try(self._even(self._time, grid))
            if self.best is None or not self.best.fits:
                self._try(self._even(self._bytes, grid))

    def rank(self) -> tuple[float, ...]:
        return (math.inf,) if self.best is None else self.best.rank

    def improve(self, tries: int) -> None:
        """Improves the best cuts, by trying about that many others near it."""
        last, stop = None, len(self._seen) + tries
        while self.best is not None and self.best is not last and len(self._seen) < stop:
            last = self.best
            for cuts in _near(last.cuts):
                self._try(cuts)

    def _time(self, stage: int, start: int, end: int) -> float:
        return self._sums.time[end] - self._sums.time[start]

    def _bytes(self, stage: int, start: int, end: int) -> float:
        """Roughly the fraction of its device's memory that a stage takes."""
        candidate, own = self.candidate, StageBytes(self._sums, start, end)
        waiting = (candidate.in_flight[stage] - 1) * (own.input if candidate.checkpointed else own.saved)
        return (own.static + own.saved + waiting) / max(1.0, self._devices[candidate.schedule.placement[stage]].memory)

    def _even(self, size: Callable[[int, int, int], float], grid: Sequence[int]) -> Cuts | None:
        """The cuts on a grid whose largest stage is smallest, with each stage measured on its device."""
        stages, last = self.candidate.schedule.stages, len(grid) - 1
        if last < stages:
            return None

        def filled(most: float) -> Cuts | None:
            found, at = [0], 0
            for stage in range(stages):
                room = last - (stages - stage - 1)  # Leaves a layer for each of the other stages.
                end = at + bisect_right(
                    range(at + 1, room + 1), most, key=lambda end: size(stage, grid[at], grid[end])  # noqa: B023
                )
                if end == at:
                    return None
                found.append(grid[at := end])
            return tuple(found) if at == last else None

        low, high = 0.0, max(size(stage, 0, grid[-1]) for stage in range(stages))
        best = filled(high)
        for _ in range(40):
            middle = (low + high) / 2
            smaller = filled(middle)
            low, high, best = (low, middle, smaller) if smaller else (middle, high, best)
        return best

    def _try(self, cuts: Cuts | None) -> None:
        if cuts is None or cuts in self._seen:
            return
        self._seen.add(cuts)
        candidate, profile = self.candidate, self._profile
        placed = zip(candidate.schedule.placement, cuts, cuts[1:])
        home = [device for device, start, end in placed for _ in range(start, end)]
        if profile.own_compute and any(home[one] != home[other] for one, other in profile.tied):
            return
        taken = memory(candidate, self._sums, cuts)
        times = costs(candidate, self._sums, cuts, profile)
        missing = tuple(max(0.0, size - device.memory) for size, device in zip(taken, self._devices))
        time = candidate.order.makespan(times)
        found = Choice(candidate, self._devices, cuts, times, time, tuple(taken), missing)
        if self.best is None or found.rank < self.best.rank:
            self.best = found


def _near(cuts: Cuts) -> Iterator[Cuts]:
    """Cuts with neighbouring boundaries moved together: one layer more here is one less there."""
    inner = len(cuts) - 1
    for first in range(1, inner):
        for last in range(first, inner):
            for step in (1, -1, 2, -2) if first == last else (1, -1):
                moved = [at + step if first <= number <= last else at for number, at in enumerate(cuts)]
                if all(one < two for one, two in zip(moved, moved[1:])):
                    yield tuple(moved)
