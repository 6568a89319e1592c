"""Cuts by time and by size, for any module; the module is left as it was."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.balance import cuts, cuts_by_size, cuts_by_time, units
from splitpipe.balance.units import Times
from splitpipe.core.stream import Place
from tests.doors.test_bad_input import of_module
from tests.helpers.modules import Net, batch

BOTH = pytest.mark.parametrize("choose", [cuts_by_time, cuts_by_size], ids=lambda choose: choose.__name__)


def test_the_fullest_stage_is_as_small_as_can_be() -> None:
    module = Net((8, 8, 512))
    assert cuts_by_size(2, module, batch()) == ["blocks.2"]
    assert cuts_by_size(3, module, batch(), chunks=2, param_scale=4.0) == ["blocks.1", "blocks.2"]
    assert cuts_by_size(1, module, batch()) == []


def test_the_slowest_stage_is_as_fast_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "times_of", lambda _: [Times(1, 2, 0), Times(1, 1, 0), Times(2, 3, 0), Times(3, 3, 3)])
    monkeypatch.setattr(cuts, "overhead", lambda *_: [Times(0.5, 0.5, 0.5)] * 4)
    assert cuts_by_time(2, Net(), batch(), timeout=1e-9) == ["blocks.2"]
    assert cuts_by_time(3, Net(), batch(), timeout=1e-9) == ["blocks.1", "blocks.2"]


def test_a_storage_that_two_units_save_counts_once() -> None:
    """All blocks save the scale; none before them does."""
    found = units.Units(Net(), ["blocks.0", "blocks.1", "blocks.2"], [Place(torch.device("cpu"))], None, ((), batch()))
    found.discover()
    sizes, state = found.bytes(found.recorded()), found.state()
    scale, block = 4 * 5 * 4, 2 * 8 * 16 * 4 + 16 * 4 + 8 * 4
    assert [each.saved_input >= scale for each in sizes[1:]] == [False, True, True]
    assert [each.saved_output for each in sizes[:-1]] == [each.saved_input for each in sizes[1:]]
    # The tied head is the embedding's.
    assert state == [(12 * 8 * 4, 4), (block, 0), (block, 0), (block, 0)]
    assert [each.input for each in sizes[1:]] == [4 * 5 * 8 * 4 + scale] * 3


@BOTH
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.thorough
def test_the_module_is_left_as_it_was(choose: Callable[..., list[str]], labels: bool) -> None:
    module = Net().eval()
    module.blocks[1].register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    module.embedding.weight.grad = torch.ones_like(module.embedding.weight)
    before, state = of_module(module), torch.get_rng_state()
    found = choose(2, module, batch(labels=labels))
    assert of_module(module) == before and torch.equal(torch.get_rng_state(), state)
    module.blocks[1]._forward_hooks.clear()
    model = SplitPipe(module, cuts=found, devices=["cpu"] * 2, chunks=2)
    torch.testing.assert_close(model(**batch())["logits"], copy.deepcopy(module)(**batch())["logits"])


@BOTH
@pytest.mark.thorough
def test_a_sequential_is_cut_before_its_layers(choose: Callable[..., list[str]]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    found = choose(3, layers, torch.randn(2, 4))
    assert found == ["1", "2"]
    assert SplitPipe(layers, cuts=found, devices=["cpu"] * 3).balance == [1, 1, 1]


@BOTH
def test_more_stages_than_blocks_are_refused(choose: Callable[..., list[str]]) -> None:
    with pytest.raises(ValueError, match="partitions is 5: expected 1 to 4, as each stage needs at least a block"):
        choose(5, Net(), batch())
