"""Hooks with the split engine: each fires as often, and sees the same, as in the unwrapped module."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors, twins

CHECKPOINT = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
LIMIT = pytest.mark.parametrize("stash_limit", [None, 0])


def pair(**options: Any) -> tuple[nn.Sequential, SplitPipe]:
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    return twins(nn.Sequential(*layers), [2, 3], chunks=3, **options)


@CHECKPOINT
@LIMIT
def test_tensor_hooks_of_parameters_fire_once_and_may_change_the_gradient(checkpoint: str, stash_limit: Any) -> None:
    logs = []
    x = torch.randn(7, 4)
    models = pair(checkpoint=checkpoint, stash_limit=stash_limit)
    for model in models:
        log: dict[str, list[Tensor]] = {}
        for name, parameter in model.named_parameters():

            def hook(grad: Tensor, name: str = name, log: dict[str, list[Tensor]] = log) -> Tensor:
                log.setdefault(name, []).append(grad.clone())
                return grad * 3

            parameter.register_hook(hook)
        model(x).square().sum().backward()
        logs.append(log)
    assert_same(dict(sorted(logs[1].items())), dict(sorted(logs[0].items())), "what hooks saw")
    assert all(len(found) == 1 for found in logs[1].values())
    assert_same_tensors(models[1], models[0])


@CHECKPOINT
@LIMIT
def test_post_accumulate_hooks_fire_once_with_the_whole_gradient(checkpoint: str, stash_limit: Any) -> None:
    x = torch.randn(7, 4)
    fired: list[str] = []
    models = pair(checkpoint=checkpoint, stash_limit=stash_limit)
    for model in models:
        fired.clear()
        for name, parameter in model.named_parameters():

            def step(parameter: Tensor, name: str = name) -> None:
                fired.append(name)
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
        assert sorted(fired) == sorted(list(dict(model.named_parameters())) * 2)
    assert_same_tensors(models[1], models[0])


def test_hooks_of_parameters_that_the_loss_does_not_reach_stay_silent() -> None:
    fired: list[str] = []
    _, model = pair(checkpoint="never")
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: fired.append(name))
    loss = model(torch.randn(7, 4, requires_grad=True)).square().sum()
    torch.autograd.grad(loss, model[2].weight)
    assert fired == ["2.weight"]


@CHECKPOINT
def test_backward_hooks_of_modules_see_the_microbatches(checkpoint: str) -> None:
    x = torch.randn(6, 4)
    plain, model = pair(checkpoint=checkpoint)
    seen: list[list[Any]] = []
    for m in (plain, model):
        log: list[Any] = []
        seen.append(log)
        m[2].register_full_backward_hook(lambda _, inputs, outputs, log=log: log.append((inputs[0], outputs[0])))
        m[2].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 2,))
        m(x.clone().requires_grad_()).square().sum().backward()
    parts = seen[1][::-1]  # The last microbatch goes backward first.
    assert len(parts) == 3
    for whole, found in zip(seen[0][0], zip(*parts)):
        torch.testing.assert_close(torch.cat(found), whole)
    assert_same_tensors(model, plain)


@CHECKPOINT
def test_gradients_accumulate_in_place_over_backwards(checkpoint: str) -> None:
    plain, model = pair(checkpoint=checkpoint)
    for _ in range(3):
        x = torch.randn(7, 4)
        for m in (plain, model):
            m(x).square().sum().backward()
    assert_same_tensors(model, plain)
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    for m in (plain, model):
        m(x).square().sum().backward()
    assert all(parameter.grad is kept[name] for name, parameter in model.named_parameters())
    assert_same_tensors(model, plain)
