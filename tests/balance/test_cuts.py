"""Cuts by time and by size, for a module that is no nn.Sequential; the module is left as it was."""
from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.balance import balance_by_size, balance_by_time, balances
from splitpipe.balance.units import Chain, Times, Units
from splitpipe.core.stream import Place
from tests.doors.test_bad_input import of_module
from tests.helpers.modules import Net, batch

BOTH = pytest.mark.parametrize(
    "choose", [partial(balance_by_time, timeout=0.05), balance_by_size], ids=["by time", "by size"]
)


def test_the_fullest_stage_is_as_small_as_can_be() -> None:
    module = Net((8, 8, 512))
    assert balance_by_size(2, module, batch()) == ["blocks.2"]
    assert balance_by_size(3, module, batch(), chunks=2, param_scale=4.0) == ["blocks.1", "blocks.2"]
    assert balance_by_size(1, module, batch()) == []


def test_the_slowest_stage_is_as_fast_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [Times(1, 2, 0), Times(1, 1, 0), Times(2, 3, 0), Times(3, 3, 3)]
    monkeypatch.setattr(balances, "times_of", lambda _: times)
    monkeypatch.setattr(balances, "overhead", lambda *_: [Times(0.5, 0.5, 0.5)] * 4)
    assert balance_by_time(2, Net(), batch(), timeout=1e-9) == ["blocks.2"]
    assert balance_by_time(3, Net(), batch(), timeout=1e-9) == ["blocks.1", "blocks.2"]


def test_a_storage_that_two_units_save_counts_once() -> None:
    """All blocks save the scale; none before them does."""
    found = Units(Net(), ["blocks.0", "blocks.1", "blocks.2"], [Place(torch.device("cpu"))], None, ((), batch()))
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
def test_the_module_is_left_as_it_was(choose: Callable[..., Any], labels: bool) -> None:
    module = Net().eval()
    module.blocks[1].register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    module.embedding.weight.grad = torch.ones_like(module.embedding.weight)
    before, state = of_module(module), torch.get_rng_state()
    found = choose(2, module, batch(labels=labels))
    assert of_module(module) == before and torch.equal(torch.get_rng_state(), state)
    module.blocks[1]._forward_hooks.clear()
    model = SplitPipe(module, cuts=found, devices=["cpu"] * 2, chunks=2)
    torch.testing.assert_close(model(**batch())["logits"], copy.deepcopy(module)(**batch())["logits"])


@pytest.mark.thorough
@BOTH
def test_a_sequential_that_runs_its_layers_itself_is_cut_by_name(choose: Callable[..., Any]) -> None:
    found = choose(3, Chain(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    assert found == ["1", "2"]


def test_an_infinite_size_names_its_part() -> None:
    with pytest.raises(ValueError, match=r"param_scale is 1e\+308: expected .* bytes of part 0 "):
        balance_by_size(2, Net(), batch(), param_scale=1e308)


@BOTH
def test_more_stages_than_blocks_are_refused(choose: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="partitions is 5: expected 1 to 4, as each stage needs at least a block"):
        choose(5, Net(), batch())


@BOTH
def test_an_error_in_training_says_that_a_copy_was_measured(choose: Callable[..., Any]) -> None:
    class Odd(Net):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            if self.training:
                raise KeyError("odd")
            return super().forward(ids, labels)

    with pytest.raises(KeyError) as caught:
        choose(2, Odd(), batch(), device="cpu")
    assert caught.value.__notes__[-1] == "Raised while profiling Odd, 1 chunk, cpu, in a copy. The model is unchanged."
