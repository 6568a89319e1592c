"""A plan for a module with a forward of its own: what is measured, chosen, printed and applied."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import Plan, SplitPipe
from splitpipe.balance.survey import Surveyed, surveyed
from splitpipe.balance.units import Units, times_of
from splitpipe.checks import verify_devices
from splitpipe.core.stream import Place
from splitpipe.planner import measure
from splitpipe.planner.costs import LayerSums, StageBytes
from splitpipe.planner.planning import chosen
from splitpipe.planner.profile import Profile
from splitpipe.planner.work import Work
from splitpipe.schedule import build
from tests.clients.tiny import FOUR, MORE
from tests.doors.test_bad_input import of_module
from tests.helpers.modules import Net, batch
from tests.helpers.planned import emulated


def loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


WAYS: dict[str, dict[str, Any]] = {
    "the module's own loss": {"sample": batch()},
    "a loss_fn": {"sample": batch(labels=False), "target": batch()["labels"], "loss_fn": loss},
    "the drop-in": {"sample": (batch()["ids"],)},
}


def planned(module: nn.Module, way: str = "the module's own loss", **options: Any) -> Plan:
    given = {"devices": ["cpu", "cpu"], "chunks": 2, "seconds": 0, **WAYS[way], **options}
    if way != "the drop-in":
        given.setdefault("schedules", ["1f1b"])
    return splitpipe.plan(module, **given)


def trained(model: Any, way: str) -> None:
    sample = WAYS[way]["sample"]
    if way == "the drop-in":
        model(*sample)["logits"].sum().backward()
    elif way == "a loss_fn":
        model(**sample, target=WAYS[way]["target"]).backward()
    else:
        model(**sample)["loss"].backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thorough
def test_a_plan_has_cuts_and_the_line_that_it_prints_runs(way: str) -> None:
    found = planned(Net(), way)
    assert found.layers == ("(start)", "blocks.0", "blocks.1", "blocks.2")
    assert found.cuts == (found.layers[found.balance[0]],)
    assert (found.dropin, found.own_loss) == (way == "the drop-in", way == "the module's own loss")
    given = {"splitpipe": splitpipe, "module": Net(), "loss_fn": loss}
    exec(str(found).splitlines()[1], given)
    for model in given["model"], found.apply(Net()), SplitPipe(Net(), **found.arguments()):
        assert isinstance(model, SplitPipe) and model.cuts == list(found.cuts)
        trained(model, way)
        assert model.get_parameter("embedding.weight").grad is not None


@pytest.mark.parametrize("schedule", [
    "gpipe", build("1f1b", 2, 2, split=True), build("interleaved-1f1b", 2, 2), replace(build("1f1b", 2, 2), name="mine")
], ids=lambda schedule: getattr(schedule, "name", schedule))
@pytest.mark.thorough
def test_any_schedule_of_it_can_be_pasted(schedule: Any) -> None:
    found = planned(Net(), schedules=[schedule])
    given = {"splitpipe": splitpipe, "module": Net(), "plan": found}
    exec(str(found).splitlines()[1], given)
    model: Any = given["model"]
    assert model.schedule == found.schedule and found.apply(Net()).schedule == found.schedule
    with model.record() as timeline:  # It goes backward by itself.
        model(**batch())["loss"].backward()
    assert "stage 1 on cpu" in str(found.compare(timeline))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thorough
def test_the_module_is_left_as_it_was(way: str) -> None:
    module = Net().eval()
    module.blocks[1].register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    module.embedding.weight.grad = torch.ones_like(module.embedding.weight)
    before, state = of_module(module), torch.get_rng_state()
    planned(module, way)
    assert of_module(module) == before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.thorough
def test_a_single_stage_is_a_plan_with_no_cuts() -> None:
    found = planned(Net(), devices=["cpu"])
    assert found.cuts == () and "cuts=[]" in str(found)
    trained(found.apply(Net()), "the module's own loss")


@pytest.mark.thorough
def test_it_is_written_and_read(tmp_path: Path) -> None:
    found = planned(Net())
    found.to_json(tmp_path / "plan.json")
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == found and str(again) == str(found)
    trained(again.apply(Net()), "the module's own loss")


@pytest.mark.thorough
def test_cuts_that_are_not_where_stages_begin_are_refused() -> None:
    found = planned(Net())
    with pytest.raises(ValueError, match="expected the names of the layers with which stages start"):
        replace(found, cuts=("embedding",))


def test_schedules_without_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="schedules were given, but no loss_fn"):
        planned(Net(), "the drop-in", schedules=["1f1b"])


def test_what_a_block_raises_says_that_it_was_measured() -> None:
    class Odd(Net):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
            if self.training:
                raise KeyError("odd")
            return super().forward(ids, labels)

    with pytest.raises(KeyError) as caught:
        planned(Odd())
    assert any("Raised while profiling Odd, 2 chunks, cpu" in note for note in caught.value.__notes__)


# What is measured.


def profiled(chunks: Sequence[int] = (2,), rows: int = 1, **options: Any) -> Profile:
    places = verify_devices(["cpu"] * rows, rows)
    more = {"memory": None, "optimizer_state": 2.0, "seconds": 0.01, "progress": lambda *_: None, **options}
    return measure.profile(Net(), surveyed(Net(), batch()), None, None, places, chunks, **more)


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["once", "again"])
def test_each_unit_has_the_costs_of_a_stage(seconds: float) -> None:
    done: list[tuple[int, int]] = []
    found = profiled((1, 2), seconds=seconds, progress=lambda at, whole, what: done.append((at, whole)))
    block = 2 * 8 * 16 * 4 + 16 * 4 + 8 * 4
    assert not found.tied and found.blockwise and done == [(0, 8), (4, 8)]
    one, two = found.kinds[0].layers[1], found.kinds[0].layers[2]
    assert [layer.parameters for layer in one] == [12 * 8 * 4, block, block, block]
    assert [layer.state for layer in one] == [4, 0, 0, 0]
    assert all(layer.saved and layer.kept for layer in one[1:])
    assert [layer.input for layer in one] == [2 * layer.input for layer in two]
    assert [layer.saved_input for layer in one[1:]] == [layer.saved_output for layer in one[:-1]]


def test_a_module_that_does_not_fit_on_a_device_is_measured_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def measured(self: Work, of: Surveyed, places: Sequence[Any], chunks: int) -> list[Any]:
        seen.append(len(places))
        if len(places) == 1:
            raise torch.OutOfMemoryError("none")
        return []

    monkeypatch.setattr(Work, "_parts", measured)
    units = Work(surveyed(Net(), batch()), None, None, 0.0, 1, lambda *_: None)
    here, there = Place(torch.device("cpu")), Place(torch.device("meta"))
    assert units.walk([here, there], 2) == [] and seen == [1, 2]
    with pytest.raises(torch.OutOfMemoryError):
        units.walk([here, here], 2)


def test_units_on_several_devices_are_stages_in_a_row() -> None:
    places = verify_devices(["cpu", "cpu"], 2)
    units = Units(Net(), ["blocks.0", "blocks.1", "blocks.2"], places, None, ((), batch()))
    assert units.schedule.placement == (0, 0, 1, 1)
    units.run()
    assert len(times_of(units.recorded(lambda done: done < 2, 2))) == 4


def test_a_checkpointed_stage_keeps_what_enters_each_block() -> None:
    whole, blockwise = (LayerSums(emulated(0, blockwise=each), 0, 2) for each in (False, True))
    inputs = blockwise.input
    assert blockwise.entered(2, 5) == sum(inputs[2:5]) and whole.entered(2, 5) == inputs[2]
    assert StageBytes(blockwise, 2, 5).during_again["B"] < StageBytes(whole, 2, 5).during_again["B"]


@pytest.mark.thorough
def test_a_profile_with_units_becomes_a_plan_with_cuts() -> None:
    found = chosen([emulated(0, blockwise=True)], ["1f1b"], own_loss=True)
    assert found.cuts is not None and len(found.cuts) == len(found.balance) - 1 and found.loss_fn is None


MODELS = {**FOUR, **MORE}


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*FOUR, "mixtral", "bart"])
def test_a_transformer_is_planned_by_its_layers(name: str) -> None:
    tiny = MODELS[name]
    module, sample = tiny.made(), tiny.batch()
    found = planned(module, sample=sample)
    assert {*tiny.cuts} <= {*found.layers} and found.own_loss
    found.apply(module)(**sample).loss.backward()
    assert any(x.grad is not None for x in module.parameters())


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_a_transformer_of_one_layer_again_and_again_is_refused() -> None:
    with pytest.raises(ValueError, match="has no repeated blocks"):
        planned(MODELS["albert"].made(), sample=MODELS["albert"].batch())
