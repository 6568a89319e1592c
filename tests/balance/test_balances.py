"""Balances and cuts that fit the model, and the devices that they are measured on."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.balance import balance_by_size, balance_by_time, balances
from splitpipe.balance.rig import Chain, Layer
from splitpipe.core.stream import Place
from tests.helpers.modules import Net, batch

pytestmark = [pytest.mark.usefixtures("no_accelerator"), pytest.mark.draws]

def identities(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(count)))


@pytest.mark.parametrize(
    ("each", "balance"),
    [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4]), ([9, 1, 1, 1, 1, 1], [1, 5])],
)
def test_times_or_bytes_of_stages_are_as_even_as_can_be(
    each: list[int], balance: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [Layer(time, 2 * time, time / 2, saved=1000 - time) for time in each]
    monkeypatch.setattr(balances, "measure", lambda *_, **__: slow)
    assert balance_by_time(2, identities(6), torch.ones(2, 3)) == balance
    large = [Layer(9, 9, 9, saved=100 + size, repeated=100, state=size) for size in each]
    monkeypatch.setattr(balances, "measure", lambda *_, **__: large)
    assert balance_by_size(2, identities(6), torch.ones(2, 3)) == balance
    assert balance_by_size(2, Chain(*identities(6)), torch.ones(2, 3)) == [str(balance[0])]


def test_the_scale_weighs_parameters_against_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(1, 1, 1, saved=7 - size, parameters=size) for size in (1, 2, 3, 4, 5, 6)]
    monkeypatch.setattr(balances, "measure", lambda *_, **__: layers)
    assert balance_by_size(2, identities(6), torch.ones(2, 3), param_scale=0) == [2, 4]
    assert balance_by_size(2, identities(6), torch.ones(2, 3), param_scale=100) == [4, 2]


def test_blocks_are_balanced_by_their_names() -> None:
    module = Net((8, 8, 512))
    assert balance_by_size(2, module, batch()) == ["blocks.2"]
    assert balance_by_size(3, module, batch(), chunks=2, param_scale=4.0) == ["blocks.1", "blocks.2"]
    assert balance_by_size(1, module, batch()) == []
    cuts = balance_by_time(2, module, batch(), timeout=0.05)
    model = SplitPipe(module.eval(), cuts=cuts, devices=["cpu"] * 2, chunks=2)
    torch.testing.assert_close(model(**batch())["logits"], copy.deepcopy(module)(**batch())["logits"])


@pytest.mark.parametrize(("device", "found"), [
    ("cpu", ["cpu"]), (torch.device("cpu"), ["cpu"]), (None, ["cpu"]), ("cuda:1", ["cuda:1"]),
    (None, ["cuda:0", "cuda:1"]),
])
def test_a_copy_runs_on_the_device_that_is_named_or_by_default_on_accelerators(
    device: Any, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda:0" in found or "cuda:1" in found:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
        )
    seen: list[Place] = []
    monkeypatch.setattr(balances, "measure", lambda _, places, **__: seen.extend(places) or [Layer(1, 1, 1)])
    balance_by_time(1, identities(1), torch.ones(1), device=device)
    assert [str(place.device) for place in seen] == found
