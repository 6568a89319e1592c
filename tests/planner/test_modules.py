"""Plans for modules with a forward of their own, and for compiled layers: measured, chosen, printed and applied."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import Plan, SplitPipe
from tests.clients.tiny import FOUR, MORE
from tests.compiled.test_layers import blocks
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import graphs as graphs
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.modules import Net, batch

pytestmark = pytest.mark.draws


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


def test_schedules_without_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="schedules were given, but no loss_fn"):
        planned(Net(), "the drop-in", schedules=["1f1b"])


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
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Torch's.
@pytest.mark.parametrize("by_cuts", [False, True])
def test_layers_are_compiled_for_each_number_of_chunks(by_cuts, nothing_compiled, graphs):
    module = Net() if by_cuts else blocks(4)
    x = torch.randn(8, 4)
    given: dict[str, Any] = {"sample": batch()} if by_cuts else {"sample": x, "target": x, "loss_fn": nn.MSELoss()}
    before = [x.clone() for x in module.state_dict().values()]
    found = splitpipe.plan(module, **given, devices=["cpu"] * 2, chunks=[1, 2], schedules=["1f1b"], seconds=0,
                           compile=EAGER)
    assert found.compile == found.arguments()["compile"] == EAGER and "compile={" in str(found)
    assert len(graphs) >= 2
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert all(map(torch.equal, before, module.state_dict().values()))
