"""The calls at which a module may be cut, and balances and cuts that fit the model."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.balance import balance_by_size, balance_by_time, balances
from splitpipe.balance.rig import Chain, Layer
from splitpipe.balance.survey import survey
from splitpipe.core.stream import Place
from tests.helpers.modules import Net, batch

pytestmark = [pytest.mark.usefixtures("no_accelerator"), pytest.mark.draws]

def identities(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(count)))


@pytest.mark.parametrize(("each", "balance"),
                         [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4]), ([9, 1, 1, 1, 1, 1], [1, 5])])
def test_times_or_bytes_of_stages_are_as_even_as_can_be(each, balance, monkeypatch):
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


@pytest.mark.parametrize(("device", "found"), [("cpu", ["cpu"]), (torch.device("cpu"), ["cpu"]), (None, ["cpu"]),
                                               ("cuda:1", ["cuda:1"]), (None, ["cuda:0", "cuda:1"])])
def test_a_copy_runs_on_the_device_that_is_named_or_by_default_on_accelerators(device, found, monkeypatch):
    if "cuda:0" in found or "cuda:1" in found:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator",
                            lambda check_available=False: torch.device("cuda"))
    seen: list[Place] = []
    monkeypatch.setattr(balances, "measure", lambda _, places, **__: seen.extend(places) or [Layer(1, 1, 1)])
    balance_by_time(1, identities(1), torch.ones(1), device=device)
    assert [str(place.device) for place in seen] == found


class Run(nn.Module):
    """Parts under names, called as a function says."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def one(_: Any = None) -> nn.Linear:
    return nn.Linear(3, 3)


def pair(_: Any = None) -> nn.Sequential:
    return nn.Sequential(one(), nn.Tanh())


def in_turn(*names: str) -> Callable[..., Any]:
    def run(module: nn.Module, x: Any) -> Any:
        for name in names:
            x = module.get_submodule(name)(x)
        return x

    return run


def stack() -> Run:
    return Run(in_turn("blocks.0", "blocks.1"), blocks=nn.ModuleList(map(pair, range(2))))


CASES = {
    "layers of a list": (stack(), ["blocks.1"]),
    "what is first in a stack of which there are two": (Run(in_turn("a", "b"), a=stack(), b=stack()),
                                                        ["a.blocks.1", "b.blocks.0", "b.blocks.1"]),
    "blocks of an nn.Sequential in a list": (
        Run(in_turn("body.0", "body.1"), body=nn.ModuleList(nn.Sequential(pair(), pair()) for _ in range(2))),
        ["body.0.1", "body.1.0", "body.1.1"],
    ),
    "single layers where nothing else repeats": (Run(in_turn("a", "b", "c"), a=one(), b=one(), c=one()), ["b", "c"]),
    "blocks before layers": (Run(in_turn("a", "b", "c", "d"), a=one(), b=pair(), c=one(), d=pair()), ["b", "d"]),
    "in the order of calls": (Run(in_turn("c", "b", "a"), a=one(), b=one(), c=one()), ["b", "a"]),
    "not what is called again": (Run(in_turn("a", "b", "a", "c"), a=one(), b=one(), c=one()), ["b", "c"]),
    "not experts of a layer": (
        Run(in_turn("layers.0", "layers.1"), layers=nn.ModuleList(Run(in_turn("experts.1", "experts.0"), experts=(
            nn.ModuleList(map(pair, range(2))))) for _ in range(2))), ["layers.1"]),
    "not what is never called": (Run(in_turn("a", "b"), a=one(), b=one(), c=one()), ["b"]),
}


@pytest.mark.parametrize("name", CASES)
def test_cuts_are_calls_of_blocks_that_repeat(name: str) -> None:
    module, expected = CASES[name]
    assert survey(module, torch.randn(2, 3)).names == ("(start)", *expected)


def test_two_rows_of_the_batch_run_in_a_copy_in_eval_mode() -> None:
    seen: list[Any] = []

    def run(module: nn.Module, x: dict[str, Tensor]) -> Tensor:
        seen.append((x["a"].shape, x["whole"].shape, module.training))
        return module.get_submodule("b")(module.get_submodule("a")(x["a"]))

    module = Run(run, a=one(), b=one())
    survey(module, ({"a": torch.randn(4, 3), "whole": torch.randn(3, 2)},))
    assert seen == [((2, 3), (3, 2), False)] and module.training


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("loss", "one"), [(lambda y: y.mean(), True), (lambda y: y.mean().reshape(1), True),
                                           (lambda y: y.mean(1), False)])
def test_a_loss_for_each_row_is_no_loss_of_a_schedule(loss: Any, one: bool, rows: int) -> None:
    module = Run(lambda own, x: {"loss": loss(own.b(own.a(x)))}, a=pair(), b=pair())
    assert survey(module, torch.randn(rows, 3)).has_loss == (one or rows == 1)


def test_what_a_block_raises_says_where() -> None:
    with pytest.raises(IndexError) as caught:
        survey(Net(), {"ids": torch.full((2, 3), 99)})
    assert "copy of the Net ran on two rows" in "".join(caught.value.__notes__)
