"""Calls of a model from where it is called already: from a layer of its own, and from a checkpoint around it."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.modules import module_of
from tests.helpers.scheduled import twins
from tests.helpers.twin import assert_same_tensors
from tests.promise.layers import Apply


def calling(self: Any, x: Tensor) -> Tensor:
    """Calls a model in forward, if it has one."""
    for model in self.model:
        model(x)
    return x * 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("target", [None, torch.zeros(5, 4)])
def test_a_layer_that_calls_its_own_model_is_told_so(name: str, target: Tensor | None) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), module_of(calling, model=[]), nn.Linear(4, 4))
    plain, model = twins(layers, name, loss_fn=F.mse_loss)
    x = torch.rand(5, 4)
    model[1].model = [model]
    with pytest.raises(RuntimeError, match="called by one of its layers"):
        model(x, target)
    model[1].model = []
    F.mse_loss(plain(x), torch.zeros(5, 4)).backward()
    model(x, target=torch.zeros(5, 4)).backward()
    assert_same_tensors(model, plain)


def differentiated(x: Tensor) -> Tensor:
    """The gradient of an energy, as of force fields."""
    with torch.enable_grad():
        found, = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    return found


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_checkpoint_around_a_model_whose_layer_differentiates_is_right(mode: Any) -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), Apply(differentiated)), "gpipe", checkpoint=mode, loss_fn=None)
    x = torch.rand(5, 4)
    for either in plain, model:
        checkpoint(either, x, use_reentrant=False).sum().backward()
    assert_same_tensors(model, plain)
