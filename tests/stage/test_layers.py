"""What is known of a model's layers is found out again when the model has changed, or others take their places."""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.stream import Place
from splitpipe.stage import layers
from splitpipe.stage.layers import StageLayers
from tests.helpers.covering import pairwise
from tests.helpers.scheduled import loss_of
from tests.helpers.twin import Looped, assert_same, assert_same_tensors, twins
from tests.promise.layers import Apply

CPU = ["cpu"] * 2


def trained(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x).square().mean()
    loss.backward()
    return loss


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter": lambda first: setattr(first[0], "weight", nn.Parameter(torch.full((4, 4), 0.5))),
    "a module": lambda first: first.__setitem__(1, nn.Softplus()),
    "a mode": lambda first: first.eval(),
    "a flag": lambda first: first[0].weight.requires_grad_(False),
    "a buffer": lambda first: first[3].register_buffer("running_mean", torch.full((4,), 2.0)),
    "one more buffer": lambda first: first[3].register_buffer("more", torch.ones(4)),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_what_changes_between_two_steps_counts_in_the_second(how: str, checkpoint: Any, by: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0), nn.BatchNorm1d(4).eval())
    plain, model = twins(nn.Sequential(inner, nn.Linear(4, 2)), [1, 1], by, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    for each in (plain, model):
        trained(each, x)
        CHANGES[how](each[0])
        each.zero_grad()
    torch.testing.assert_close(trained(model, x), trained(plain, x))
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("where", [{"balance": [1, 1]}, {"cuts": ["1"]}], ids=["balance", "cuts"])
def test_parameters_of_one_call_are_not_kept_after_it(schedule: Any, where: dict[str, Any]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = SplitPipe(layers, **where, devices=CPU, chunks=2, schedule=schedule, loss_fn=nn.MSELoss())
    for requires_grad in (True, False):
        other = torch.rand(2, 4, requires_grad=requires_grad)
        gone, given = weakref.ref(other), (torch.randn(4, 4),)
        functional_call(model, {"1.weight": other}, given, {"target": torch.zeros(4, 2)}).backward()
        assert (other.grad is not None) is requires_grad
        del other
        model(*given, target=torch.zeros(4, 2))
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b", "loss_fn": nn.MSELoss()}])
def test_parameters_that_the_caller_has_computed_are_an_error_that_names_them(options: dict[str, Any]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = SplitPipe(layers, [1, 1], devices=CPU, chunks=2, **options)
    computed = {"1.weight": layers[1].weight * 2}
    with pytest.raises(RuntimeError, match=r"'1\.weight' is computed from other tensors.*backward='autograd'"):
        functional_call(model, computed, (torch.randn(4, 4),), {"target": torch.zeros(4, 2)} if options else {})
    with torch.no_grad():
        found = functional_call(model, computed, (x := torch.randn(4, 4),))
        torch.testing.assert_close(found, functional_call(layers, computed, (x,)))


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def wrapped(module: nn.Sequential, **options: Any) -> SplitPipe:
    return SplitPipe(module, [2, 2], **{"devices": ["cpu", "cpu"], "chunks": 2, **options})


#: Where another layer is put: in the original, in the pipeline, or by its name.
PLACES: dict[str, Callable[[nn.Sequential, SplitPipe, nn.Module], object]] = {
    "original": lambda module, model, layer: module.__setitem__(2, layer),
    "pipeline": lambda module, model, layer: model.__setitem__(2, layer),
    "name": lambda module, model, layer: model.set_submodule("2", layer),
}


@pairwise(replace=[*PLACES], schedule=["gpipe", "1f1b"], called=[False, True])
def test_a_layer_that_takes_anothers_place_is_the_one_that_runs(replace: str, schedule: str, called: bool) -> None:
    module, x, y = made(), torch.randn(6, 4), torch.randn(6, 2)
    plain = copy.deepcopy(module)
    model = wrapped(module, schedule=schedule, loss_fn=F.mse_loss if schedule != "gpipe" else None)
    if called:
        model(x)
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plain[2] = copy.deepcopy(layer)
    PLACES[replace](module, model, layer)
    assert model[2] is module[2] is layer and list(model.state_dict()) == list(plain.state_dict())
    for each in (plain, model):
        loss_of(each, x, y, F.mse_loss).backward()
    assert_same(model(x), plain(x), "output")
    assert_same_tensors(model, plain)
    assert_same(copy.deepcopy(model)(x), plain(x), "output of a copy")


class Tracked(nn.Module):
    """Uses a tensor that isn't a parameter."""

    weight = torch.ones(4, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pairwise(where=["balance", "cuts"], schedule=["gpipe", "1f1b"], backward=["split", "autograd"], inside=[False, True])
def test_a_layer_that_does_what_none_did_before_is_noticed(where, schedule, backward, inside):
    for layer in (nn.ReLU(inplace=True), Apply(lambda x: x.mul_(2)), nn.Dropout(0.0), Tracked()):
        kind = Looped if where == "cuts" else nn.Sequential
        module = kind(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2))
        plain, x, y = copy.deepcopy(module), torch.randn(6, 4), torch.randn(6, 2)
        how: dict[str, Any] = {"cuts": ["1"]} if where == "cuts" else {"balance": [1, 1]}
        loss_fn = None if schedule == "gpipe" else F.mse_loss
        model = SplitPipe(module, devices=["cpu", "cpu"], chunks=2, schedule=schedule, loss_fn=loss_fn,
                          checkpoint="always", backward=backward, **how)
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


def test_more_or_fewer_layers_in_the_original_are_an_error_at_the_next_call() -> None:
    x = torch.randn(6, 4)
    for change in (lambda module: module.append(nn.Tanh()), lambda module: module.pop(1)):
        module = made()
        model = wrapped(module)
        model(x)
        change(module)
        with pytest.raises(RuntimeError, match=r"layers now, but balance \[2, 2\] was given for 4"):
            model(x)


def test_stages_on_the_cpu_have_a_worker_each_unless_some_share_state_and_an_accelerator_has_one() -> None:
    a, b, c = (nn.BatchNorm1d(2) for _ in range(3))
    tied, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = tied.weight
    cpu, meta = Place(torch.device("cpu")), Place(torch.device("meta"))

    def workers(*stages: list[nn.Module], places: Sequence[Place] = (cpu,) * 9) -> list[int]:
        own = [StageLayers(j, places[j], [("", layer) for layer in stage], {}) for j, stage in enumerate(stages)]
        return layers.workers(own, range(len(own)))

    assert workers([a], [b], [c]) == [0, 1, 2]
    assert workers([tied], [other]) == [0, 1]
    assert workers([a], [b], [a]) == workers([a], [b], [nn.Sequential(c, a)]) == [0, 0, 0]
    assert workers([tied], [nn.Sequential(tied)]) == [0, 0]
    relu, empty = nn.ReLU(), nn.Sequential()
    assert workers([relu, empty, c], [relu, empty]) == [0, 1]
    assert workers() == []
    assert workers(*[[nn.Tanh()] for _ in range(5)], places=[meta, cpu, meta, cpu, meta]) == [0, 1, 0, 2, 0]
