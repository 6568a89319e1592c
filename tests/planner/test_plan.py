"""A plan: what it says, how it is applied, written and read; and what is said if there is none."""
from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import DoesNotFitError, Plan, SplitPipe
from splitpipe.planner.planning import chosen
from splitpipe.schedule import Costs, Schedule, build
from splitpipe.schedule.recording.recording import Recording
from splitpipe.schedule.recording.step import Step
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splitpipe plan": 1}, "another version wrote it"),
        ({"balance": None}, "TypeError"),
        ({"costs": {**asdict(Costs()), "forward": -1}}, "forward=-1"),
        ({"costs": {"forwards": 1}}, "forwards"),
        ({"schedule": {"name": "", "rows": [[["X", 0, 0]]], "placement": [0]}}, "has no plan"),
        ({"schedule": {"name": "", "rows": [[["BW", 0, 0], ["F", 0, 0]]], "placement": [0]}}, "has no plan"),
        ({"way": ...}, "'way'"),
    ],
)
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
    return replace(
        made(), schedule=schedule, dropin=dropin, devices=("cpu",) * 3, balance=(1,) * schedule.stages,
        chunks=schedule.microbatches, layers=tuple(map(str, range(schedule.stages))), costs=Costs(), runners_up=(),
    )


@pytest.mark.parametrize(
    ("schedule", "dropin"),
    [
        (build("zb-h1", 3, 4), False),
        (build("1f1b", 3, 4, split=True), False),
        (build("interleaved-1f1b", 3, 4, stages_per_device=3), False),
        (build("interleaved-low-memory", 3, 4, group=2), False),
        (replace(build("1f1b", 3, 4, split=True), name="mine"), False),
        (build("gpipe", 3, 4, split=True), True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
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
    spans = tuple(
        tuple(span._replace(start=factor * span.start, end=factor * span.end) for span in row)
        for row in found.timeline.spans
    )
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
