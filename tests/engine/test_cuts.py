"""What may be named in cuts, in which order, and how a Sequential is cut by names."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, attach
from splitpipe.partition.blocks import Blocks, device_map
from tests.engine.models import SCHEDULES, Stack, assert_same_step, batch, piped
from tests.helpers.modules import module_of


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


@pytest.mark.parametrize(("cuts", "balance"), [(["2"], [2, 2]), (["1", "3"], [1, 2, 1]), ([], [4])])
def test_names_of_a_sequentials_layers_are_a_balance(cuts: list[str], balance: list[int]) -> None:
    model = SplitPipe(layers(), cuts=cuts, devices=["cpu"] * 3)
    assert model.balance == balance and model.cuts == []


def test_a_sequential_cut_inside_of_a_layer_runs_in_segments() -> None:
    module, x = layers(), torch.randn(6, 4)
    model = piped(module, ["2.1", "3"])
    assert model.balance == [] and model.cuts == ["2.1", "3"]
    torch.testing.assert_close(model(x), module(x))
    assert len(model) == 4 and model[2][1] is [*model][2][1] and list(model.state_dict()) == list(module.state_dict())


@pytest.mark.parametrize("place", [SplitPipe, attach])
@pytest.mark.parametrize(("cuts", "words"), [
    (["layers.9"], r"cuts\[0\] is 'layers.9', not a submodule of Stack \(did you mean .*'layers.1'"),
    (["wrong", "layers"], r"cuts\[0\] is 'wrong'.*; "
                          r"cuts\[1\] is 'layers', a ModuleList, which is never called: .*'layers.0' or 'layers.1'"),
])
def test_wrong_names_are_told_all_together_and_others_suggested(place: Any, cuts: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place(Stack(), cuts=cuts, devices=["cpu"] * 3)


@pytest.mark.parametrize("cuts", [["3", "1"], ["1", "1"], ["0"]])
def test_layers_of_a_sequential_come_in_their_order(cuts: list[str]) -> None:
    with pytest.raises(ValueError, match="names of layers in order, without repetition, and without the first"):
        SplitPipe(layers(), cuts=cuts, devices=["cpu"] * 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cuts_in_another_order_than_the_calls_are_refused(schedule: str) -> None:
    model = piped(Stack(), ["layers.3", "layers.1"], schedule=schedule)
    with pytest.raises(ValueError, match=r"'layers.3'.*, where stage 1 starts, .*'layers.1'.*|"
                                         r"'layers.1'.*'layers.3'") as error:
        model(**batch())
    assert "expected cuts= in the order in which the forward calls them" in str(error.value)


class Again(Stack):
    """Calls blocks of an earlier stage after later ones have begun."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x).tanh()
        return {"loss": (x - labels).square().mean(), "y": x}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_block_of_an_earlier_stage_may_be_called_again(schedule: str, checkpoint: str) -> None:
    assert_same_step(Again(), batch(), cuts=["layers.1", "layers.3"], schedule=schedule, checkpoint=checkpoint)


def test_hf_device_map_has_every_block_and_layer() -> None:
    cpu = torch.device("cpu")
    module = attach(Stack(), cuts=["layers.2"], devices=["cpu", "cpu"])
    names = ["first", "layers.0", "layers.1", "layers.2", "layers.3", "last"]
    assert module.hf_device_map == dict.fromkeys(names, cpu)
    assert SplitPipe(Stack(), cuts=["layers.2"], devices=["cpu", "cpu"]).hf_device_map == module.hf_device_map
    piped = SplitPipe(layers(), [1, len(layers()) - 1], devices=["cpu", "cpu"])
    assert piped.hf_device_map == dict.fromkeys(["0", "1", "2", "3"], cpu)


def test_the_device_map_before_the_first_call() -> None:
    one, two, three = devices = [torch.device("meta", number) for number in range(3)]
    stack = Stack()
    # It knows its encoder by two names, the first of which no cut has.
    module = module_of(lambda self, x, labels: self.base(x, labels), alias=stack, base=stack)
    blocks = Blocks(module, ["base.layers.1", "base.layers.3"])
    found = device_map(blocks, {}, devices, placed=False)
    for name in "alias", "base":
        assert {key.removeprefix(f"{name}."): device for key, device in found.items() if key.startswith(name)} == {
            "first": one, "layers.0": one, "layers.1": two, "layers.2": two, "layers.3": three, "last": three,
            "last.weight": one,  # The first layer's.
        }
    assert [*found.values()] == sorted(found.values(), key=devices.index)
    assert device_map(blocks, {module.base.last: 1}, devices, placed=False)["base.last"] == two
