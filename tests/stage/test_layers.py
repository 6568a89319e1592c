"""The facts about a model's layers are determined again when the model has changed."""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitpipe import SplitPipe
from tests.helpers.twin import assert_same_tensors

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
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_changes_between_two_steps_counts_in_the_second(how: str, checkpoint: Any) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0), nn.BatchNorm1d(4).eval())
    plain = nn.Sequential(inner, nn.Linear(4, 2))
    model = SplitPipe(copy.deepcopy(plain), [1, 1], devices=CPU, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    for each in (plain, model):
        trained(each, x)
        CHANGES[how](list(each.children())[0])
        each.zero_grad()
    torch.testing.assert_close(trained(model, x), trained(plain, x))
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parameters_of_one_call_are_not_kept_after_it(schedule: Any) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = SplitPipe(layers, [1, 1], devices=CPU, chunks=2, schedule=schedule, loss_fn=nn.MSELoss())
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
