"""Chooses cuts, devices, schedule, microbatches and checkpointing together, by simulation, within each device's memory.

Every candidate is tried with the cuts that balance its stages' times, or their memory; then the most promising ones are
improved, one boundary at a time. Choices are compared by missing bytes first, then by the time of a step.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from typing import Any

from splitpipe.planner.costs import Candidate, Cut, LayerSums, candidates, costs, memory, span
from splitpipe.planner.profile import Device, Layer, Profile
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Schedule

_FEW = 60  # If a candidate has at most this many cuts, all are tried.
_WORK = 1_500_000  # Roughly the number of ops that are simulated in all: a few seconds.
_NEAR = 0.01  # Times are equal if they differ by a smaller fraction: predictions aren't more accurate.
_ORDERS = 24  # Orders of unlike devices that are tried.
_ALL = 4  # Up to this number of devices, all sets are tried.


@dataclass(frozen=True)
class Choice:
    """One candidate on some devices, one per row of its schedule, with its best cut."""

    candidate: Candidate
    devices: tuple[Device, ...]
    cut: Cut
    costs: Costs  # The times of its stages, in milliseconds.
    time: float  # One step, in milliseconds.
    memory: tuple[float, ...]  # The most bytes on each device.
    missing: tuple[float, ...]  # The bytes that each device lacks.
    compile: bool | Mapping[str, Any] = False  # How layers are compiled, as ``SplitPipe`` takes it.

    @property
    def way(self) -> str:
        """The schedule's name and options, microbatches, what is checkpointed, and whether layers are compiled."""
        return f"{self.candidate}{', compiled' if self.compile else ''}"

    @property
    def balance(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(end - start for start, end in zip(self.cut, self.cut[1:]))

    @property
    def rank(self) -> tuple[float, ...]:
        """The key by which choices are compared; smaller is better."""
        return max(self.missing), sum(self.missing), self.time

    @property
    def fits(self) -> bool:
        """True if no device lacks memory."""
        return not any(self.missing)


def choose(
    profile: Profile,
    schedules: Sequence[str | Schedule] | None = None,
    dropin: bool = False,
    work: int = _WORK,
) -> list[Choice]:
    """The best choice of each candidate: first those that fit, by time, then others. Empty if there are too few layers.

    Roughly ``work`` ops are simulated to improve on the first cuts.
    """
    searches: list[_Search] = []
    others: list[tuple[_Search, _Search]] = []  # Other orders of the same devices, paired with the first order.
    sums: dict[tuple[int, int], LayerSums] = {}
    made: dict[int, list[Candidate]] = {}
    least = math.inf
    for group in _groups(profile):
        if searches and _bound(profile, group[0]) > least * (1 + _NEAR):
            continue
        count = len(group[0])
        if count not in made:
            made[count] = list(candidates(count, profile.chunks, len(profile.names), schedules, dropin))
        for candidate in made[count]:
            first, *more = (_Search(profile, candidate, order, sums) for order in group)
            first.begin()
            searches.append(first)
            others += [(first, other) for other in more]
            if first.best is not None and first.best.fits:
                least = min(least, first.best.time)
    left = work / 2
    for _, search in sorted(others, key=lambda pair: pair[0].rank()):
        if left > 0:
            search.begin()
            searches.append(search)
            left -= search.played
    left = work
    for search in sorted(searches, key=_Search.rank):
        if left > 0:
            before = search.played
            search.improve(left)
            left -= search.played - before
    found: dict[tuple[str, int, str], Choice] = {}
    for search in sorted(searches, key=_Search.rank):
        of = search.candidate
        if search.best is not None:
            found.setdefault((of.variant, of.chunks, of.checkpoint), search.best)
    return _simplest_first(list(found.values()))


def better(found: list[Choice], others: list[Choice]) -> list[Choice]:
    """All choices, led by the first of ``others`` if it is clearly faster than that of ``found``, or only it fits."""
    if not found or not others:
        return found or others
    (first, *_), (other, *_) = found, others
    faster = other.time < first.time * (1 - _NEAR) if other.fits and first.fits else other.rank < first.rank
    best = other if faster else first
    return [best, *sorted((each for each in found + others if each is not best), key=lambda each: each.rank)]


def _simplest_first(found: list[Choice]) -> list[Choice]:
    """The choices, starting with the simplest of those as good as the best: fewest stages, then least memory."""
    good = [each for each in found if each.fits and each.time <= found[0].time * (1 + _NEAR)]
    if not good:
        return found
    simple = min(good, key=lambda each: (len(each.cut), max(each.memory), each.time))
    return [simple, *(each for each in found if each is not simple)]


def _groups(profile: Profile) -> Iterator[list[tuple[Device, ...]]]:
    """For each set of devices, the orders of them to try. Threads of a CPU are all used."""
    for count in range(len(profile.devices), 0 if profile.own_compute else len(profile.devices) - 1, -1):
        sets: dict[tuple[tuple[int, float], ...], list[Device]] = {}
        for chosen in _chosen(profile, count):
            sets.setdefault(tuple(sorted(map(_sort, chosen))), chosen)
        for chosen in sets.values():
            distinct: dict[tuple[tuple[int, float], ...], tuple[Device, ...]] = {}
            for order in _orders(chosen, profile):
                distinct.setdefault(tuple(map(_sort, order)), order)
                if len(distinct) == _ORDERS:
                    break
            yield list(distinct.values())


def _sort(device: Device) -> tuple[int, float]:
    """A key that is the same for like devices."""
    return device.kind, device.memory


def _chosen(profile: Profile, count: int) -> Iterator[list[Device]]:
    """Sets of ``count`` devices, without those that are too slow to help or have too little memory for a layer."""
    devices = profile.devices
    if len(devices) <= _ALL:
        yield from map(list, combinations(devices, count))
        return
    roomy = sorted(range(len(devices)), key=lambda at: (-devices[at].memory, _pace(profile, devices[at]), at))
    for small in range(len(devices) - count + 1):
        left = sorted(roomy[: len(devices) - small], key=lambda at: (_pace(profile, devices[at]), at))
        yield [devices[at] for at in sorted(left[:count])]


def _bound(profile: Profile, devices: Sequence[Device]) -> float:
    """A lower bound for a step on these devices: all layers spread over them, without idle time."""
    found = []
    for number in profile.chunks:
        rows = [list(map(_work, profile.kinds[device.kind].layers[number])) for device in devices]
        paces = [1 / max(sum(row), 1e-30) for row in rows]
        least: float = sum(min(pace * time for pace, time in zip(paces, layer)) for layer in zip(*rows))
        found.append(number * least / sum(paces))
    return min(found)


def _work(layer: Layer) -> float:
    return layer.forward + layer.backward_input + layer.backward_weight


def _orders(devices: list[Device], profile: Profile) -> Iterator[tuple[Device, ...]]:
    yield tuple(devices)
    if len(set(map(_sort, devices))) == 1:
        return
    for key in (lambda device: device.memory), (lambda device: _pace(profile, device)):
        yield tuple(sorted(devices, key=key))
        yield tuple(sorted(devices, key=key, reverse=True))
    if len(devices) <= 6:
        yield from permutations(devices)


def _pace(profile: Profile, device: Device) -> float:
    return sum(map(_work, profile.kinds[device.kind].layers[profile.chunks[0]]))


class _Search:
    """The search for the best cut of one candidate on one order of devices."""

    def __init__(
        self, profile: Profile, candidate: Candidate, devices: tuple[Device, ...],
        sums: dict[tuple[int, int], LayerSums],
    ) -> None:
        self.candidate = candidate
        self.best: Choice | None = None
        self._profile = profile
        self._devices = devices
        self._layers = len(profile.names)
        self._sums: list[LayerSums] = []
        for device in (devices[row] for row in candidate.schedule.placement):
            key = device.kind, candidate.chunks
            if key not in sums:
                sums[key] = LayerSums(profile, *key)
            self._sums.append(sums[key])
        self._seen: set[Cut] = set()
        self._ops = sum(map(len, candidate.schedule.rows))

    @property
    def played(self) -> int:
        """Roughly the number of ops simulated so far."""
        return len(self._seen) * self._ops

    def rank(self) -> tuple[float, ...]:
        """The rank of the best choice so far."""
        return (math.inf,) if self.best is None else self.best.rank

    def begin(self) -> None:
        """Tries cuts that balance the stages' times, or their bytes."""
        grids: list[Sequence[int]] = [range(self._layers + 1)]
        if self._profile.own_compute and self._profile.tied:  # In a single stage, they are on one device.
            grids.append([at for at in grids[0] if not any(one < at <= two for one, two in self._profile.tied)])
        for grid in grids:
            self._try(self._even(self._work, grid))
            if self.best is None or not self.best.fits:
                self._try(self._even(self._bytes, grid))
        if self.best is None:
            self._try_all()

    def _work(self, stage: int, start: int, end: int) -> float:
        work = self._sums[stage].work
        return work[end] - work[start]

    def _bytes(self, stage: int, start: int, end: int) -> float:
        """Roughly the fraction of its device's memory that a stage takes."""
        room = self._devices[self.candidate.schedule.placement[stage]].memory
        if math.isinf(room):
            return 0.0
        sums, (inputs, whole, late) = self._sums[stage], self.candidate.most[stage]
        activations = whole * (sums.saved[end] - sums.saved[start]) + late * (sums.kept[end] - sums.kept[start])
        taken = sums.static[end] - sums.static[start] + activations + inputs * sums.entered(start, end)
        return taken / room if room > 0 else taken

    def improve(self, work: int) -> None:
        """Improves the best cut by simulating about ``work`` ops."""
        stop = self.played + work
        if math.comb(self._layers - 1, len(self._sums) - 1) <= _FEW:
            self._try_all()
            return
        last = None
        while self.best is not last and self.best is not None and self.played < stop:
            last = self.best
            for cut in self._near(last.cut):
                self._try(cut)

    def _try_all(self) -> None:
        """Tries all cuts, or the first of them."""
        for inner in islice(combinations(range(1, self._layers), len(self._sums) - 1), _FEW):
            self._try((0, *inner, self._layers))

    def _near(self, cut: Cut) -> Iterator[Cut]:
        """Cuts with neighbouring boundaries moved together: one layer more here is one less there."""
        inner = len(cut) - 1
        for first in range(1, inner):
            for last in range(first, inner):
                for step in (1, -1, 2, -2) if first == last else (1, -1):
                    moved = [at + step if first <= number <= last else at for number, at in enumerate(cut)]
                    if all(one < two for one, two in zip(moved, moved[1:])):
                        yield tuple(moved)

    def _even(self, size: Callable[[int, int, int], float], grid: Sequence[int]) -> Cut | None:
        """The cut on a grid whose largest stage is smallest, with each stage measured on its device."""
        stages, last = len(self._sums), len(grid) - 1
        if last < stages:
            return None

        def cut(most: float) -> Cut | None:
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

        low, high = 0.0, max(size(stage, 0, self._layers) for stage in range(stages))
        best = cut(high)
        for _ in range(40):
            middle = (low + high) / 2
            made = cut(middle)
            low, high, best = (low, middle, made) if made else (middle, high, best)
        return best

    def _try(self, cut: Cut | None) -> None:
        if cut is not None and cut not in self._seen:
            self._seen.add(cut)
            found = self._choice(cut)
            if found is not None and (self.best is None or found.rank < self.best.rank):
                self.best = found

    def _choice(self, cut: Cut) -> Choice | None:
        candidate, profile = self.candidate, self._profile
        placed = zip(candidate.schedule.placement, cut, cut[1:])
        home = [device for device, start, end in placed for _ in range(start, end)]
        if profile.own_compute and any(home[one] != home[other] for one, other in profile.tied):
            return None
        taken = memory(candidate, self._sums, cut)
        missing = [max(0.0, size - device.memory) for size, device in zip(taken, self._devices)]
        times = costs(candidate, self._sums, cut, profile)
        return Choice(
            candidate=candidate,
            devices=self._devices,
            cut=cut,
            costs=times,
            time=span(candidate, times, profile.own_compute),
            memory=tuple(taken),
            missing=tuple(missing),
            compile=profile.compile,
        )
