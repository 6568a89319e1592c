"""A SplitPipe with a schedule: its sizes, inside another model; its loss is an ordinary one, whatever is done with it.
"""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.modules import module_of
from tests.helpers.scheduled import mean, mlp, twins
from tests.helpers.twin import assert_same, assert_same_tensors

CPU = ["cpu"] * 2


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_model_with_a_schedule_is_a_layer_of_another(loss: bool, backward: Any) -> None:
    """Which adds its loss, or its output."""
    def adding(self: Any, x: Tensor) -> Tensor:
        if not loss:
            return self.model(x) + x  # type: ignore[no-any-return]
        y = F.mse_loss(self.model(x), x) if isinstance(self.model, nn.Sequential) else self.model(x, target=x)
        return y.expand_as(x) + x  # type: ignore[no-any-return]

    plain = nn.Sequential(nn.Linear(4, 4), module_of(adding, model=mlp(4)), nn.Linear(4, 4))
    layers = copy.deepcopy(plain)
    layers[1].model = SplitPipe(layers[1].model, [2, 2], devices=CPU, chunks=2, schedule="1f1b", loss_fn=F.mse_loss)
    model = SplitPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=1 if loss else 3, schedule="zb-h1",
                      loss_fn=F.mse_loss, backward=backward)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for each in (model(x, target=y), F.mse_loss(plain(x), y)):
        each.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")


def test_a_loss_that_was_dropped_without_a_backward_is_warned_of_once() -> None:
    _, model = twins(mlp(5), "1f1b", 2, chunks=2)
    x = torch.randn(4, 4)
    kept = model(x, target=0.25) + model(x, target=0.25)  # The first one is dropped, its graph is not.
    with torch.no_grad():
        model(x, target=0.25)
    kept.backward()
    model(x, target=0.25)
    with pytest.warns(UserWarning, match=r"last call was dropped without a backward: .* Expected loss.backward\(\)"):
        model(x, target=0.25)
    model(x, target=0.25).backward()


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "zb-v": ("zb-v", {}), "zb-h1, autograd": ("zb-h1", {"backward": "autograd"}), "1f1b": ("1f1b", {}),
    "v-half, checkpointed": ("v-half", {"checkpoint": "always"}),
}


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


@pytest.mark.parametrize("way", few(2, WAYS))
@pytest.mark.parametrize("use", [
    *[lambda module, loss, factor=factor: (loss * factor).backward() for factor in (-3.0, 1.0, 0.0, 1e-300)],
    scaled, penalised, again_and_again,
])
def test_a_loss_may_be_scaled_added_to_and_differentiated_twice(use: Any, way: str) -> None:
    name, options = WAYS[way]
    plain, model = twins(mlp(5), name, 2, chunks=3, **options)
    x = torch.randn(7, 4)
    use(plain, mean(plain(x), 0.25))
    use(model, model(x, target=0.25))
    assert_same_tensors(model, plain)


def test_second_derivatives_are_refused() -> None:
    _, model = twins(mlp(5), "zb-v", 2, chunks=3)
    loss = model(torch.randn(7, 4), target=0.25)
    with pytest.raises(RuntimeError, match=r"create_graph=True .* compute the loss from model\(x\)"):
        loss.backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
