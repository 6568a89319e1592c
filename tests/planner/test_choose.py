"""Choosing: cuts, devices, schedule, microbatches and checkpointing by simulation, under the devices' memory."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations
from typing import Any

import pytest

from splitpipe.planner.choose import Choice, choose
from splitpipe.planner.costs import Candidate, LayerSums, candidates, costs, memory, span
from splitpipe.planner.profile import Link, Profile
from splitpipe.schedule import build, simulate
from tests.helpers.planned import MIB, emulated

NAMES = ("gpipe", "1f1b", "zb-h1", "v-half")


def every(profile: Profile, names: tuple[str, ...]) -> Iterator[tuple[float, list[float]]]:
    """Time and missing bytes of each cut of each candidate on each order of each number of devices."""
    count = len(profile.names)
    for number in range(1, len(profile.devices) + 1):
        for order in permutations(profile.devices, number):
            for it in candidates(number, profile.chunks, count, names, dropin=False):
                placed = [order[row] for row in it.schedule.placement]
                sums = [LayerSums(profile, device.kind, it.chunks) for device in placed]
                for inner in combinations(range(1, count), len(placed) - 1):
                    cut = (0, *inner, count)
                    taken = memory(it, sums, cut)
                    yield (
                        span(it, costs(it, sums, cut, profile), profile.own_compute),
                        [max(0.0, size - device.memory) for size, device in zip(taken, order)],
                    )


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("room", [math.inf, 80 * MIB])
def test_on_unequal_devices_it_is_within_5_percent_of_the_best_of_all(
    seed: int, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitpipe.planner.choose._FEW", 0)  # Cuts are searched.
    profile = emulated(seed, layers=7, chunks=(1, 4), memory=(room, room / 2, room))
    best = min(time for time, missing in every(profile, NAMES) if not any(missing))
    (found, *_) = choose(profile, schedules=NAMES)
    assert found.fits
    assert best <= found.time * (1 + 1e-9) and found.time <= 1.05 * best


@cache
def small() -> tuple[Profile, list[Choice]]:
    """A profile with few cuts, and its choices."""
    profile = emulated(3, layers=6, chunks=(4,))
    return profile, choose(profile, schedules=NAMES)


def test_few_cuts_are_all_tried() -> None:
    profile, choices = small()
    best = min(time for time, _ in every(profile, NAMES))
    assert min(found.time for found in choices) == pytest.approx(best)


def test_of_those_that_are_as_good_the_simplest_is_chosen() -> None:
    _, (first, *others) = small()
    alike = [found for found in others if found.time <= 1.005 * first.time and found.fits]
    assert all(len(found.cut) >= len(first.cut) for found in alike)
    assert all(first.time <= 1.01 * found.time for found in others if found.fits)


def test_a_faster_device_gets_more() -> None:
    profile = emulated(0, layers=24, speeds=(1, 3), chunks=(8,))
    found = choose(profile, schedules=["1f1b"])[0]
    counts = {device.name: end - start for device, start, end in zip(found.devices, found.cut, found.cut[1:])}
    assert counts["cuda:1"] > 2 * counts["cuda:0"]


@pytest.mark.thorough
@pytest.mark.parametrize(("profile", "names", "taken"), [
    pytest.param(emulated(0, speeds=(1, 1, 0.01)), NAMES, {"cuda:0", "cuda:1"}, id="too slow to help"),
    pytest.param(emulated(0, speeds=(4, 1, 1), memory=(1024, math.inf, math.inf)), NAMES, {"cuda:1", "cuda:2"},
                 id="fast, without room for a layer"),
    pytest.param(emulated(0, speeds=(1, 5, 2, 4), memory=(math.inf, 1024, math.inf, 1024), chunks=(4,)), ["1f1b"],
                 {"cuda:0", "cuda:2"}, id="of many, without room"),
])
def test_a_device_that_is_of_no_use_is_left_out(profile: Profile, names: Sequence[str], taken: set[str]) -> None:
    found = choose(profile, schedules=names)[0]
    assert found.fits and {device.name for device in found.devices} == taken


def test_a_device_without_a_limit_takes_what_others_have_no_room_for() -> None:
    profile = emulated(0, speeds=(1, 1), layers=40, memory=(30 * MIB, math.inf), chunks=(4,))
    found = choose(profile, schedules=["1f1b"], work=0)[0]
    assert found.fits and len(found.devices) == 2


def test_where_memory_is_short_cuts_go_by_what_the_schedule_holds() -> None:
    profile = emulated(0, speeds=(1, 1, 1), layers=40, chunks=(8,))
    room = max(choose(profile, schedules=["1f1b"])[0].memory) * 0.9
    tight = replace(profile, devices=tuple(replace(device, memory=room) for device in profile.devices))
    found = choose(tight, schedules=["1f1b"], work=0)
    assert any(each.fits and len(each.devices) == 3 for each in found if each.candidate.checkpoint == "never")


def test_layers_that_share_a_parameter_are_in_one_stage_if_no_device_has_both_ends() -> None:
    found = choose(emulated(0, speeds=(1, 1), layers=40, tied=((20, 39),)), schedules=["1f1b"], work=0)
    assert found and all(each.cut[1] <= 20 for each in found)


def test_devices_that_can_not_be_faster_than_the_best_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(devices: int, *others: Any) -> Iterator[Candidate]:
        counts.append(devices)
        return candidates(devices, *others)

    monkeypatch.setattr("splitpipe.planner.choose.candidates", counted)
    choose(emulated(0, speeds=(1, 1, 1), chunks=(8,), link=Link()), schedules=["zb-h1"])
    assert counts[0] == 3 and 1 not in counts


@pytest.mark.thorough
def test_threads_of_one_cpu_are_all_used() -> None:
    found = choose(replace(emulated(0, speeds=(1, 1, 1)), own_compute=False, link=Link(1000)))
    assert all(len(choice.devices) == 3 for choice in found)


def test_its_time_is_the_simulations() -> None:
    profile, choices = small()
    for found in choices[:5]:
        of = found.candidate
        sums = [LayerSums(profile, found.devices[row].kind, of.chunks) for row in of.schedule.placement]
        times = costs(of, sums, found.cut, profile)
        assert simulate(of.schedule, times).makespan == pytest.approx(found.time)


@pytest.mark.thorough
def test_every_schedule_with_a_name_is_looked_at() -> None:
    profile = emulated(1, layers=16, speeds=(1, 1, 1, 1), chunks=(8,))
    found = {choice.candidate.schedule.name for choice in choose(profile)}
    assert {"gpipe", "1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved-1f1b", "dualpipe-v"} <= found


def test_less_memory_makes_it_slower_and_never_bigger() -> None:
    before: Choice | None = None
    for room in 400, 160, 130, 110:
        found = choose(emulated(2, speeds=(1, 1), memory=room * MIB), schedules=NAMES)[0]
        assert found.fits and max(found.memory) <= room * MIB
        assert before is None or found.time >= before.time * 0.99
        before = found


@pytest.mark.thorough
def test_what_does_not_fit_says_what_is_missing() -> None:
    found = choose(emulated(2, speeds=(1, 1), memory=20 * MIB))[0]
    assert not found.fits
    for size, device, missing in zip(found.memory, found.devices, found.missing):
        assert missing == max(0, size - device.memory)


@pytest.mark.thorough
def test_layers_that_share_a_parameter_stay_on_one_device() -> None:
    for found in choose(emulated(0, speeds=(1, 1), tied=((0, 7),))):
        place = [found.candidate.schedule.placement[stage] for stage in (0, -1)]
        assert place[0] == place[1]
    assert choose(emulated(0, speeds=(1, 1), tied=((0, 7),)), schedules=["1f1b"])[0].candidate.schedule.devices == 1


def test_a_schedule_of_ones_own_is_taken_as_it_is() -> None:
    own = build("1f1b", 3, 4)
    (found, *_) = choose(emulated(0), schedules=[own])
    assert found.candidate.schedule is own


def test_without_a_loss_autograd_goes_backward() -> None:
    found = choose(emulated(0), dropin=True)
    assert {choice.candidate.schedule.name for choice in found} == {"gpipe"}
    assert {choice.candidate.checkpoint for choice in found} == {"never", "except_last", "always"}


def test_on_a_cpu_autograd_goes_backward_in_one_thread_with_all_cores() -> None:
    profile = replace(emulated(0, speeds=(1, 1), chunks=(4,)), own_compute=False, link=Link())
    found = next(each for each in choose(profile, dropin=True) if each.candidate.checkpoint == "never")
    layers = profile.kinds[0].layers[4]
    backward = 4 * sum(layer.backward_input + layer.backward_weight for layer in layers)
    forward = 4 * sum(layer.forward for layer in layers) / 2  # At least: the devices share it.
    assert forward + backward / 2 < found.time < 2 * forward + 1.2 * backward / 2


def test_the_same_profile_gives_the_same_choice() -> None:
    profile, choices = small()
    assert choose(profile, schedules=NAMES) == choices


@pytest.mark.parametrize("dropin, spaces", [(True, 3), (False, 2)])
def test_each_thread_and_stream_that_computes_has_a_workspace(dropin: bool, spaces: int) -> None:
    profile = emulated(0, layers=4, chunks=(4,), speeds=(1, 1))
    large = replace(profile, kinds=tuple(replace(kind, workspace=MIB) for kind in profile.kinds))
    names = None if dropin else ("1f1b",)
    less, more = (choose(each, schedules=names, dropin=dropin, work=0)[0] for each in (profile, large))
    assert [two - one for one, two in zip(less.memory, more.memory)] == [spaces * MIB] * 2
