"""Layers of a Sequential that take others' places after it was wrapped; a Sequential without data."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from splitpipe import DeferredBatchNorm, SplitPipe
from splitpipe.skip import skippable
from tests.helpers.covering import pairwise
from tests.helpers.scheduled import loss_of
from tests.helpers.twin import Looped, assert_same, assert_same_tensors


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def wrapped(module: nn.Sequential, **options: Any) -> SplitPipe:
    return SplitPipe(module, [2, 2], **{"devices": ["cpu", "cpu"], "chunks": 2, **options})


def in_the_original(module: nn.Sequential, model: SplitPipe, layer: nn.Module) -> None:
    module[2] = layer


def in_the_pipeline(module: nn.Sequential, model: SplitPipe, layer: nn.Module) -> None:
    model[2] = layer


def from_behind(module: nn.Sequential, model: SplitPipe, layer: nn.Module) -> None:
    model[-2] = layer


def by_name(module: nn.Sequential, model: SplitPipe, layer: nn.Module) -> None:
    model.set_submodule("2", layer)


PLACES = [in_the_original, in_the_pipeline, from_behind, by_name]


@pairwise(replace=PLACES, schedule=["gpipe", "1f1b"], called=[False, True])
def test_a_layer_that_takes_anothers_place_is_the_one_that_runs(
    replace: Callable[[nn.Sequential, SplitPipe, nn.Module], None], schedule: str, called: bool
) -> None:
    module, x, y = made(), torch.randn(6, 4), torch.randn(6, 2)
    plain = copy.deepcopy(module)
    model = wrapped(module, schedule=schedule, loss_fn=F.mse_loss if schedule != "gpipe" else None)
    if called:
        model(x)
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plain[2] = copy.deepcopy(layer)
    replace(module, model, layer)
    assert model[2] is module[2] is layer and list(model.state_dict()) == list(plain.state_dict())
    for each in (plain, model):
        loss_of(each, x, y, F.mse_loss).backward()
    assert_same(model(x), plain(x), "output")
    assert_same_tensors(model, plain)
    assert_same(copy.deepcopy(model)(x), plain(x), "output of a copy")


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Tracked(nn.Module):
    """Uses a tensor that isn't a parameter."""

    weight = torch.ones(4, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pairwise(
    where=["balance", "cuts"], schedule=["gpipe", "1f1b"], backward=["split", "autograd"], inside=[False, True]
)
def test_a_layer_that_does_what_none_did_before_is_noticed(
    where: str, schedule: str, backward: str, inside: bool
) -> None:
    for layer in (nn.ReLU(inplace=True), Scaled(), nn.Dropout(0.0), Tracked()):
        kind = Looped if where == "cuts" else nn.Sequential
        module = kind(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2))
        plain, x, y = copy.deepcopy(module), torch.randn(6, 4), torch.randn(6, 2)
        how: dict[str, Any] = {"cuts": ["1"]} if where == "cuts" else {"balance": [1, 1]}
        loss_fn = None if schedule == "gpipe" else F.mse_loss
        model = SplitPipe(
            module, devices=["cpu", "cpu"], chunks=2, schedule=schedule, loss_fn=loss_fn, checkpoint="always",
            backward=backward, **how,
        )
        for step in range(4):
            if step == 2:
                for each in (module, plain):
                    new = copy.deepcopy(layer)
                    each[0] = nn.Sequential(each[0][0], new, each[0][2]) if not inside else each[0]
                    each[0][1] = new
            model.zero_grad()
            plain.zero_grad()
            F.mse_loss(plain(x), y).backward()
            (model(x, target=y) if loss_fn else F.mse_loss(model(x), y)).backward()
            assert_same_tensors(model, plain)


@pytest.mark.parametrize("where", ["balance", "cuts"])
def test_facts_about_layers_outlive_evaluation(where: str) -> None:
    module = Looped(*made()) if where == "cuts" else made()
    how: dict[str, Any] = {"cuts": ["2"]} if where == "cuts" else {"balance": [2, 2]}
    model = SplitPipe(module, devices=["cpu", "cpu"], chunks=2, schedule="1f1b", loss_fn=F.mse_loss, **how)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    found = []
    layers = []
    for _ in range(3):
        model(x, target=y)
        layers.append(model._runtime._resources._placed())
        found.append([{**cache.facts} for cache in model._runtime._resources.caches])
        with torch.no_grad():
            model(x)
    assert layers[1] is layers[2] or where == "balance"  # A step doesn't look at all modules again.
    assert all(known.items() <= later.items() for before, after in zip(found, found[1:]) for known, later in zip(
        before, after))


def test_more_or_fewer_layers_in_the_original_are_an_error_at_the_next_call() -> None:
    x = torch.randn(6, 4)
    for change in (lambda module: module.append(nn.Tanh()), lambda module: module.pop(1)):
        module = made()
        model = wrapped(module)
        model(x)
        change(module)
        with pytest.raises(RuntimeError, match=r"layers now, but balance \[2, 2\] was given for 4"):
            model(x)


def test_what_is_put_in_is_deferred_as_the_others_were() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model = wrapped(module, deferred_batch_norm=True)
    module[1] = nn.BatchNorm1d(4)
    plain, x = copy.deepcopy(module), torch.randn(6, 4)
    model(x)
    plain(x)
    assert type(model[1]) is DeferredBatchNorm
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)


def test_what_cannot_take_the_place_is_an_error_each_time() -> None:
    class Stashing(nn.Module):
        def forward(self, x: Any) -> Any:
            yield x

    module = made()
    model, x, before = wrapped(module), torch.randn(6, 4), module[1]
    expected = model(x)
    wrong = {
        "on meta and have no data": nn.Linear(4, 4, device="meta"),
        "stashes 'skip', which no layer pops": skippable(stash=["skip"])(Stashing)(),
    }
    for words, layer in wrong.items():
        module[1] = layer
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=words):
                model(x)
    module[1] = before
    assert_same(model(x), expected, "output")


def test_indices_of_assignments_are_those_of_layers() -> None:
    model = wrapped(made())
    with pytest.raises(IndexError, match="index 4 is out of range: the model has 4 layers"):
        model[4] = nn.Tanh()
    with pytest.raises(TypeError, match="cannot assign"):
        model[1] = 3  # type: ignore[assignment]


def test_a_layer_of_a_sequential_with_cuts_is_replaced_by_its_number() -> None:
    module = made()
    module[1] = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    plain, x = copy.deepcopy(module), torch.randn(6, 4)
    model = SplitPipe(module, cuts=["1.1"], devices=["cpu", "cpu"], chunks=2)
    model(x)
    layer = nn.Linear(4, 2)
    model[3] = layer
    plain[3] = copy.deepcopy(layer)
    assert_same(model(x), plain(x), "output")


@pytest.mark.parametrize("cuts", [False, True])
def test_a_module_without_data_is_refused_by_name(cuts: bool) -> None:
    with torch.device("meta"):
        module = made()
    where: dict[str, Any] = {"cuts": ["2"]} if cuts else {"balance": [2, 2]}
    with pytest.raises(ValueError, match="'0.weight', '0.bias', '2.weight' and 3 more are on meta and have no data"):
        SplitPipe(module, devices=["cpu", "cpu"], **where)
