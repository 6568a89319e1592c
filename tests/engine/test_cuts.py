"""What may be named in cuts, in which order, and how a Sequential is cut by names."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe, attach
from tests.engine.models import SCHEDULES, Stack, batch, piped


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


@pytest.mark.parametrize("cuts", [["2"], ["1", "3"], [], ["2.1", "3"]])
def test_a_sequential_with_cuts_runs_its_own_forward(cuts: list[str]) -> None:
    module, x = layers(), torch.randn(6, 4)
    model = SplitPipe(module, cuts=cuts, devices=["cpu"] * 3, chunks=2)
    assert model.balance == [] and model.cuts == cuts
    torch.testing.assert_close(model(x), module(x))
    assert len(model) == 4 and model[2][1] is [*model][2][1] and list(model.state_dict()) == list(module.state_dict())


@pytest.mark.filterwarnings("ignore:stage 0 calls no module:UserWarning")
def test_layers_of_a_sequential_come_in_their_order_the_first_one_too() -> None:
    module, x = layers(), torch.randn(6, 4)
    for cuts, error in (["3", "1"], "after stage 2 has begun"), (["1", "1"], "each once"):
        with pytest.raises(ValueError, match=error):
            SplitPipe(layers(), cuts=cuts, devices=["cpu"] * 3)(x)
    torch.testing.assert_close(piped(module, ["0"])(x), module(x))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cuts_in_another_order_than_the_calls_are_refused(schedule: str) -> None:
    model = piped(Stack(), ["layers.3", "layers.1"], schedule=schedule)
    with pytest.raises(ValueError, match="'layers.3'.*where stage 1 starts, was called after stage 2 has") as error:
        model(**batch())
    assert "expected cuts= in the order in which the forward calls them" in str(error.value)


def test_hf_device_map_has_every_block_and_layer() -> None:
    cpu = torch.device("cpu")
    module = attach(Stack(), cuts=["layers.2"], devices=["cpu", "cpu"])
    names = ["first", "layers.0", "layers.1", "layers.2", "layers.3", "last"]
    assert module.hf_device_map == dict.fromkeys(names, cpu)
    assert SplitPipe(Stack(), cuts=["layers.2"], devices=["cpu", "cpu"]).hf_device_map == module.hf_device_map
    piped = SplitPipe(layers(), [1, len(layers()) - 1], devices=["cpu", "cpu"])
    assert piped.hf_device_map == dict.fromkeys(["0", "1", "2", "3"], cpu)
