"""A plan: how it is chosen, what it says, how it is applied, written and read; and what is said if there is none."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import DoesNotFitError, Plan, SplitPipe
from splitpipe.planner.choose import Choice, choose
from splitpipe.planner.costs import LayerSums, candidates, costs
from splitpipe.planner.measure import Profile
from splitpipe.planner.planning import chosen
from splitpipe.schedule import Costs, Schedule, build
from splitpipe.schedule.recording import Recording, Step
from tests.helpers.recording import MIB, emulated


@cache
def made(**options: object) -> Plan:
    found = chosen(emulated(0, **options), ["1f1b", "zb-h1"], nn.functional.mse_loss)  # type: ignore[arg-type]
    return replace(found, devices=("cpu",) * len(found.devices))


def layers(count: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


def test_it_is_written_and_read(tmp_path: Path) -> None:
    for found in made(), made(memory=200 * MIB), chosen(emulated(1)), replace(made(), compile={"dynamic": False}):
        found.to_json(tmp_path / "plan.json")
        again = Plan.from_json(tmp_path / "plan.json")
        assert again == found and str(again) == str(found)


@pytest.mark.parametrize(("change", "message"), [
    ({"splitpipe plan": 1}, "another version wrote it"),
    ({"balance": None}, "TypeError"),
    ({"costs": {**asdict(Costs()), "forward": -1}}, "forward=-1"),
    ({"costs": {"forwards": 1}}, "forwards"),
    ({"schedule": {"name": "", "rows": [[["X", 0, 0]]], "placement": [0]}}, "has no plan"),
    ({"schedule": {"name": "", "rows": [[["BW", 0, 0], ["F", 0, 0]]], "placement": [0]}}, "has no plan"),
    ({"way": ...}, "'way'"),
])
def test_what_is_no_plan_is_not_read(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "plan.json"
    made().to_json(path)
    text = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in text.items() if value is not ...}))
    with pytest.raises(ValueError, match=message):
        Plan.from_json(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="has no plan"):
        Plan.from_json(path)


def planned(schedule: Schedule, dropin: bool) -> Plan:
    """On three CPU stages at work, of as many layers as there are stages."""
    return replace(made(), schedule=schedule, dropin=dropin, devices=("cpu",) * 3, balance=(1,) * schedule.stages,
                   chunks=schedule.microbatches, layers=tuple(map(str, range(schedule.stages))), costs=Costs(),
                   runners_up=())


@pytest.mark.parametrize(("schedule", "dropin"), [
    (build("zb-h1", 3, 4), False),
    (build("1f1b", 3, 4, split=True), False),
    (build("interleaved-1f1b", 3, 4, stages_per_device=3), False),
    (build("interleaved-low-memory", 3, 4, group=2), False),
    (replace(build("1f1b", 3, 4, split=True), name="mine"), False),
    (build("gpipe", 3, 4, split=True), True),
], ids=lambda value: getattr(value, "name", None))
def test_the_line_that_it_prints_can_be_pasted(schedule: Schedule, dropin: bool) -> None:
    found = planned(schedule, dropin)
    module, line = layers(len(found.balance)), str(found).splitlines()[1]
    given = {"splitpipe": splitpipe, "module": module, "loss_fn": nn.functional.mse_loss, "plan": found}
    exec(line, given)
    x = torch.randn(8, 3)
    for model in given["model"], found.apply(module), SplitPipe(module, **found.arguments()):
        assert isinstance(model, SplitPipe)
        assert (model.balance, model.chunks) == (list(found.balance), found.chunks)
        assert model.checkpoint == found.checkpoint and (found.dropin or model.schedule == found.schedule)
        (model(x).sum() if found.dropin else model(x, target=x)).backward()


@pytest.mark.thorough
def test_runners_up_are_slower_or_do_not_fit() -> None:
    found = made(memory=110 * MIB)
    assert found.runners_up
    for other in found.runners_up:
        assert ("but lacks" in other.why) is (max(other.peak_bytes) > 110 * MIB)
        assert other.why.startswith("-") is (other.step_time < found.step_time)


def recorded(found: Plan, factor: float) -> Recording:
    """A step in which everything took a factor longer than planned."""
    recording = Recording(found.schedule)
    spans = tuple(tuple(span._replace(start=factor * span.start, end=factor * span.end) for span in row)
                  for row in found.timeline.spans)
    recording.add(Step(spans, copies=(), memory=(None, 2 * found.peak_bytes[1], None)))
    return recording


def test_it_is_compared_with_a_recording() -> None:
    found = made()
    comparison = found.compare(recorded(found, 2))
    assert comparison.step.error == pytest.approx(-0.5)
    for pair in (*comparison.forward, *comparison.backward):
        assert pair.recorded == pytest.approx(2 * pair.predicted)
    assert [pair and round(pair.error, 3) for pair in comparison.memory] == [None, -0.5, None]
    assert "-50.0%" in str(comparison) and "stage 2 on device" in str(comparison)


@pytest.mark.thorough
def test_a_model_that_fits_nowhere_says_what_is_missing_where() -> None:
    with pytest.raises(DoesNotFitError, match=r"cuda:\d needs .* MiB of 50 MiB, .* MiB are missing") as caught:
        made(memory=50 * MIB)
    assert len(caught.value.missing) == 3
    assert made(memory=50 * MIB + max(caught.value.missing) + 1).peak_bytes


def test_too_few_layers_for_the_schedules_are_an_error() -> None:
    with pytest.raises(ValueError, match="none of the schedules supports 3 layers"):
        chosen(emulated(0, layers=3, devices=3, own_compute=False), ["v-half"], print)


NAMES = ("gpipe", "1f1b", "zb-h1", "v-half")


def every(profile: Profile, names: tuple[str, ...]) -> Iterator[float]:
    """The time of each cut of each candidate on the first devices."""
    count = len(profile.names)
    for number in range(1, len(profile.devices) + 1):
        for it in candidates(number, [*profile.layers], names, dropin=False):
            sums = LayerSums(profile, it.chunks)
            for inner in combinations(range(1, count), it.schedule.stages - 1):
                yield it.order.makespan(costs(it, sums, (0, *inner, count), profile))


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


@pytest.mark.parametrize(("devices", "memory", "taken"), [(3, (1024, math.inf, math.inf), {"cuda:1", "cuda:2"}),
                                                          (4, (math.inf, 1024, math.inf, 1024), {"cuda:0", "cuda:2"})])
def test_a_device_without_room_for_a_layer_is_left_out(devices: int, memory: Sequence[float], taken: set[str]) -> None:
    found = choose(emulated(0, devices=devices, memory=memory, chunks=(4,)), schedules=["1f1b"])[0]
    assert found.fits and {device.name for device in found.devices} == taken


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
