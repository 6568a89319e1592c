"""The loss of a schedule is an ordinary loss: what is done with it, or not done, does to gradients what it always does.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mean, mlp, twins
from tests.helpers.twin import assert_same_tensors

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "zb-v": ("zb-v", {}), "zb-h1, autograd": ("zb-h1", {"backward": "autograd"}), "1f1b": ("1f1b", {}),
    "v-half, checkpointed": ("v-half", {"checkpoint": "always"}),
}
ways = pytest.mark.parametrize("way", few(2, WAYS))


def pair(way: str) -> tuple[nn.Sequential, SplitPipe]:
    name, options = WAYS[way]
    return twins(mlp(5), name, 2, chunks=3, **options)


def losses(plain: nn.Module, model: SplitPipe, x: Tensor) -> tuple[Tensor, Tensor]:
    return mean(plain(x), 0.25), model(x, target=0.25)


@ways
def test_a_loss_thrown_away_leaves_gradients_alone(way: str) -> None:
    plain, model = pair(way)
    model(torch.randn(7, 4), target=0.25)
    assert all(parameter.grad is None for parameter in model.parameters())
    for loss in losses(plain, model, torch.randn(7, 4)):
        loss.backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    model(torch.randn(7, 4), target=0.25)
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())
    assert_same_tensors(model, plain)


def scaled(module: nn.Module, loss: Tensor) -> None:
    loss *= 0.5
    loss.backward(torch.tensor(0.5))


def penalised(module: nn.Module, loss: Tensor) -> None:
    (loss + sum(parameter.square().sum() for parameter in module.parameters())).backward()


def again_and_again(module: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    (loss * 2).backward(retain_graph=True)
    for parameter in module.parameters():
        parameter.grad.mul_(2)  # type: ignore[union-attr]
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the .* a second time.*retain_graph=True"):
        loss.backward()


@ways
@pytest.mark.parametrize("use", [
    *[lambda module, loss, factor=factor: (loss * factor).backward() for factor in (-3.0, 1.0, 0.0, 1e-300)],
    scaled, penalised, again_and_again,
])
def test_a_loss_may_be_scaled_added_to_and_differentiated_twice(use: Any, way: str) -> None:
    plain, model = pair(way)
    for module, loss in zip((plain, model), losses(plain, model, torch.randn(7, 4))):
        use(module, loss)
    assert_same_tensors(model, plain)


def test_second_derivatives_are_refused() -> None:
    _, model = pair("zb-v")
    loss = model(torch.randn(7, 4), target=0.25)
    with pytest.raises(RuntimeError, match=r"create_graph=True .* compute the loss from model\(x\)"):
        loss.backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
