"""Chooses cuts, devices, schedule, microbatches and checkpointing together, by simulation, under each device's memory.

Every way is tried on the cuts that even out its stages' times, or their memory; then the most promising are improved,
a boundary at a time. What is compared is first how many bytes are missing, then the time of a step.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from splitpipe.planner.profile import Device, Profile
from splitpipe.planner.shares import Cut, Sums, costs, memory, span
from splitpipe.planner.ways import Way, ways
from splitpipe.schedule.op import Schedule

#: Cuts of one way are all tried if there are no more than so many.
_FEW = 60
#: Passes that are played in all, more or less: some seconds.
_WORK = 1_500_000
#: Times that differ by less are equal: no prediction is closer.
_NEAR = 0.01
#: Orders of different devices that are tried.
_ORDERS = 24


@dataclass(frozen=True)
class Choice:
    """One way on some devices, with its best cut.

    Args:
        way: to run.
        devices: a row each.
        cut: first layer of each stage, and the number of layers.
        time: of a step, in milliseconds.
        memory: the most bytes on each device.
        missing: bytes that each device lacks.
    """

    way: Way
    devices: tuple[Device, ...]
    cut: Cut
    time: float
    memory: tuple[float, ...]
    missing: tuple[float, ...]

    @property
    def rank(self) -> tuple[float, float, float]:
        """The smaller, the better."""
        return max(self.missing), sum(self.missing), self.time

    @property
    def fits(self) -> bool:
        """Whether no device lacks memory."""
        return not any(self.missing)


def choose(
    profile: Profile,
    chunks: Sequence[int] | None = None,
    schedules: Sequence[str | Schedule] | None = None,
    dropin: bool = False,
    few: int = _FEW,
    work: int = _WORK,
    fewer: bool = True,
) -> list[Choice]:
    """The best choice of each way, the best of all first.

    Args:
        profile: of the layers.
        chunks: numbers of microbatches to choose from; None: all that were measured.
        schedules: to choose from; None: all that have a name.
        dropin: whether autograd goes backward, after all of forward.
        few: cuts of one way are all tried if there are no more than so many.
        work: how many passes may be played, more or less, to improve on the first cuts.
        fewer: whether devices may be left out.

    Returns:
        Choices that fit by time, but the simplest of those that are no slower than the best first; then others by what
        they lack. None if the module has too few layers for any.
    """
    searches: list[_Search] = []
    sums: dict[tuple[int, int], Sums] = {}
    numbers = profile.chunks if chunks is None else list(chunks)
    for group in _groups(profile, fewer and profile.apart):
        for way in ways(len(group[0]), numbers, len(profile.names), schedules, dropin):
            searches += [_Search(profile, way, order, sums) for order in group]
    for search in searches:
        search.begin()
    searches = [search for search in searches if search.best is not None]
    searches.sort(key=_Search.rank)
    for search in searches:
        if work <= 0:
            break
        work -= search.improve(few, work)
    searches.sort(key=_Search.rank)
    found: dict[tuple[str, int, str], Choice] = {}
    for search in searches:
        assert search.best is not None
        way = search.way
        found.setdefault((way.variant, way.chunks, way.checkpoint), search.best)
    return _simplest_first(list(found.values()))


def _simplest_first(found: list[Choice]) -> list[Choice]:
    """Of those that are as good as the best, the one of fewest stages and least memory comes first."""
    good = [each for each in found if each.fits and each.time <= found[0].time * (1 + _NEAR)]
    if not good:
        return found
    simple = min(good, key=lambda each: (len(each.cut), max(each.memory), each.time))
    return [simple, *(each for each in found if each is not simple)]


def _groups(profile: Profile, fewer: bool) -> Iterator[list[tuple[Device, ...]]]:
    """For each number of devices, the orders of them to try. What is too slow to help is left out."""
    each = sorted(range(len(profile.devices)), key=lambda at: (_pace(profile, profile.devices[at]), at))
    for count in range(len(each), 0, -1) if fewer else [len(each)]:
        chosen = [profile.devices[at] for at in sorted(each[:count])]
        alike: dict[tuple[tuple[int, float], ...], tuple[Device, ...]] = {}
        for order in _orders(chosen, profile):
            alike.setdefault(tuple((device.kind, device.memory) for device in order), order)
            if len(alike) == _ORDERS:
                break
        yield list(alike.values())


def _orders(devices: list[Device], profile: Profile) -> Iterator[tuple[Device, ...]]:
    yield tuple(devices)
    if len({(device.kind, device.memory) for device in devices}) == 1:
        return
    for key in (lambda device: device.memory), (lambda device: _pace(profile, device)):
        yield tuple(sorted(devices, key=key))
        yield tuple(sorted(devices, key=key, reverse=True))
    if len(devices) <= 6:
        yield from permutations(devices)


def _pace(profile: Profile, device: Device) -> float:
    layers = profile.kinds[device.kind].layers[profile.chunks[0]]
    return sum(layer.forward + layer.backward_input + layer.backward_weight for layer in layers)


class _Search:
    """The search for the best cut of one way on one order of devices."""

    def __init__(
        self, profile: Profile, way: Way, devices: tuple[Device, ...], sums: dict[tuple[int, int], Sums]
    ) -> None:
        self.way = way
        self.best: Choice | None = None
        self._profile = profile
        self._devices = devices
        self._layers = len(profile.names)
        self._sums: list[Sums] = []
        for device in (devices[row] for row in way.schedule.placement):
            key = device.kind, way.chunks
            if key not in sums:
                sums[key] = Sums(profile, *key)
            self._sums.append(sums[key])
        self._seen: dict[Cut, Choice | None] = {}
        self._ops = sum(map(len, way.schedule.rows))

    def rank(self) -> tuple[float, ...]:
        """Of the best."""
        return (math.inf,) if self.best is None else self.best.rank

    def begin(self) -> None:
        """Tries cuts that even out what stages take."""
        sizes = [1 / self._capacity(stage) for stage in range(len(self._sums))]
        self._try(self._even(lambda stage, start, end: self._sums[stage].work[end] - self._sums[stage].work[start]))
        if self.best is None or not self.best.fits:
            self._try(self._even(lambda stage, start, end: self._bytes(stage, start, end) * sizes[stage]))
        if self.best is None:  # Tied layers.
            for cut in self._all(_FEW):
                self._try(cut)

    def _capacity(self, stage: int) -> float:
        room = self._devices[self.way.schedule.placement[stage]].memory
        return room if math.isfinite(room) and room > 0 else 1.0

    def _bytes(self, stage: int, start: int, end: int) -> float:
        sums = self._sums[stage]
        return sums.static[end] - sums.static[start] + sums.saved[end] - sums.saved[start]

    def improve(self, few: int, work: int) -> int:
        """Improves the best cut; gives how many passes were played for it."""
        before = len(self._seen)
        if math.comb(self._layers - 1, len(self._sums) - 1) <= few:
            for cut in self._all(few):
                self._try(cut)
            return (len(self._seen) - before) * self._ops
        last = None
        while self.best is not last and self.best is not None and (len(self._seen) - before) * self._ops < work:
            last = self.best
            for cut in self._near(last.cut):
                self._try(cut)
        return (len(self._seen) - before) * self._ops

    def _all(self, most: int) -> Iterator[Cut]:
        for count, inner in enumerate(combinations(range(1, self._layers), len(self._sums) - 1)):
            if count == most:
                return
            yield (0, *inner, self._layers)

    def _near(self, cut: Cut) -> Iterator[Cut]:
        """Cuts with neighbouring boundaries moved together: a layer more here is one less there."""
        inner = len(cut) - 1
        for first in range(1, inner):
            for last in range(first, inner):
                for step in (1, -1, 2, -2) if first == last else (1, -1):
                    moved = [at + step if first <= number <= last else at for number, at in enumerate(cut)]
                    if all(one < two for one, two in zip(moved, moved[1:])):
                        yield tuple(moved)

    def _even(self, size: Callable[[int, int, int], float]) -> Cut:
        """The cut whose largest stage is smallest, each stage measured on its own device."""
        stages, layers = len(self._sums), self._layers

        def cut(most: float) -> Cut | None:
            found, at = [0], 0
            for stage in range(stages):
                room = layers - (stages - stage - 1)  # A layer for each of the others.
                end = at + bisect_right(range(at + 1, room + 1), most, key=lambda end: size(stage, at, end))  # noqa: B023
                if end == at:
                    return None
                found.append(at := end)
            return tuple(found) if at == layers else None

        low, high = 0.0, max(size(stage, 0, layers) for stage in range(stages))
        best = cut(high)
        for _ in range(40):
            middle = (low + high) / 2
            made = cut(middle)
            low, high, best = (low, middle, made) if made else (middle, high, best)
        assert best is not None
        return best

    def _try(self, cut: Cut) -> None:
        if cut not in self._seen:
            self._seen[cut] = found = self._choice(cut)
            if found is not None and (self.best is None or found.rank < self.best.rank):
                self.best = found

    def _choice(self, cut: Cut) -> Choice | None:
        way, profile = self.way, self._profile
        placed = zip(way.schedule.placement, cut, cut[1:])
        home = [device for device, start, end in placed for _ in range(start, end)]
        if profile.apart and any(home[one] != home[other] for one, other in profile.tied):
            return None
        taken = memory(way, self._sums, cut)
        missing = [max(0.0, size - device.memory) for size, device in zip(taken, self._devices)]
        time = span(way, costs(way, self._sums, cut, profile), profile.apart)
        return Choice(way, self._devices, cut, time, tuple(taken), tuple(missing))
