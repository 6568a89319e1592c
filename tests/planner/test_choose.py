"""Choosing: cuts, devices, schedule, microbatches and checkpointing by simulation, under the devices' memory."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from splitpipe.planner.choose import Choice, choose
from splitpipe.planner.costs import LayerSums, candidates, costs, span
from splitpipe.planner.profile import Profile
from splitpipe.schedule import build
from tests.helpers.recording import MIB, emulated

NAMES = ("gpipe", "1f1b", "zb-h1", "v-half")


def every(profile: Profile, names: tuple[str, ...]) -> Iterator[float]:
    """The time of each cut of each candidate on the first devices."""
    count = len(profile.names)
    for number in range(1, len(profile.devices) + 1):
        for it in candidates(number, [*profile.layers], count, names, dropin=False):
            sums = LayerSums(profile, it.chunks)
            for inner in combinations(range(1, count), it.schedule.stages - 1):
                yield span(it, costs(it, sums, (0, *inner, count), profile))


@cache
def small() -> tuple[Profile, list[Choice]]:
    """A profile with few cuts, and its choices."""
    profile = emulated(3, layers=6, devices=3, chunks=(4,))
    return profile, choose(profile, schedules=NAMES)


def test_the_best_of_few_cuts_is_found() -> None:
    profile, choices = small()
    assert min(found.time for found in choices) == pytest.approx(min(every(profile, NAMES)))


def test_of_those_that_are_as_good_the_simplest_is_chosen() -> None:
    _, (first, *others) = small()
    alike = [found for found in others if found.time <= 1.005 * first.time and found.fits]
    assert all(len(found.cut) >= len(first.cut) for found in alike)
    assert all(first.time <= 1.01 * found.time for found in others if found.fits)


@pytest.mark.parametrize(("devices", "memory", "taken"), [
    (3, (1024, math.inf, math.inf), {"cuda:1", "cuda:2"}),
    (4, (math.inf, 1024, math.inf, 1024), {"cuda:0", "cuda:2"}),
])
def test_a_device_without_room_for_a_layer_is_left_out(devices: int, memory: Sequence[float], taken: set[str]) -> None:
    found = choose(emulated(0, devices=devices, memory=memory, chunks=(4,)), schedules=["1f1b"])[0]
    assert found.fits and {device.name for device in found.devices} == taken


def test_a_device_without_a_limit_takes_what_others_have_no_room_for() -> None:
    profile = emulated(0, devices=2, layers=40, memory=(30 * MIB, math.inf), chunks=(4,))
    found = choose(profile, schedules=["1f1b"], tries=0)[0]
    assert found.fits and len(found.devices) == 2


def test_where_memory_is_short_cuts_go_by_what_the_schedule_holds() -> None:
    profile = emulated(0, devices=3, layers=40, chunks=(8,))
    room = max(choose(profile, schedules=["1f1b"])[0].memory) * 0.9
    tight = replace(profile, devices=tuple(replace(device, memory=room) for device in profile.devices))
    found = choose(tight, schedules=["1f1b"], tries=0)
    assert any(each.fits and len(each.devices) == 3 for each in found if each.candidate.checkpoint == "never")


def test_less_memory_makes_it_slower_and_never_bigger() -> None:
    before: Choice | None = None
    for room in 400, 160, 130, 110:
        found = choose(emulated(2, devices=2, memory=room * MIB), schedules=NAMES)[0]
        assert found.fits and max(found.memory) <= room * MIB
        assert before is None or found.time >= before.time * 0.99
        before = found


@pytest.mark.thorough
def test_layers_that_share_a_parameter_stay_on_one_device() -> None:
    for found in choose(emulated(0, devices=2, tied=((0, 7),))):
        place = [found.candidate.schedule.placement[stage] for stage in (0, -1)]
        assert place[0] == place[1]
    assert choose(emulated(0, devices=2, tied=((0, 7),)), schedules=["1f1b"])[0].candidate.schedule.devices == 1


def test_a_schedule_of_ones_own_is_taken_as_it_is() -> None:
    own = build("1f1b", 3, 4)
    (found, *_) = choose(emulated(0), schedules=[own])
    assert found.candidate.schedule is own


def test_without_a_loss_autograd_goes_backward() -> None:
    found = choose(emulated(0), dropin=True)
    assert {choice.candidate.schedule.name for choice in found} == {"gpipe"}
    assert {choice.candidate.checkpoint for choice in found} == {"never", "except_last", "always"}
