"""A checkpoint around a model that goes backward itself keeps nothing of it, and never asks for it in its own pass."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_loss_and_what_the_caller_computes_beside_it(name: str, mode: str, early: bool) -> None:
    plain, model = twins(mlp(4), name, 1 if name == "zb-v" else 2, loss_fn=F.mse_loss, chunks=3, checkpoint=mode)
    target, given = torch.randn(7, 4), torch.randn(7, 4)
    found = []
    for loss_of in (lambda x: model(x, target=target), lambda x: F.mse_loss(plain(x), target)):
        x, factor = given.clone().requires_grad_(), torch.tensor(3.0, requires_grad=True)

        def beside(x: Tensor, factor: Tensor = factor, loss_of: Any = loss_of) -> Tensor:
            loss: Tensor = loss_of((x * factor).tanh()) * factor
            return loss

        with set_checkpoint_early_stop(early):
            loss: Any = checkpoint(beside, x, use_reentrant=False)
            loss.backward()
        found.append([loss.detach(), x.grad, factor.grad])
    torch.testing.assert_close(found[0], found[1])
    assert_same_tensors(model, plain)


class Loss(nn.Module):
    """What a model makes of its input, as a loss for each sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        loss = self.model(x, target=zeros) if isinstance(self.model, SplitPipe) else F.mse_loss(self.model(x), zeros)
        return loss.expand(len(x))


@pytest.mark.parametrize("schedule", [{}, {"schedule": "1f1b", "loss_fn": F.mse_loss}])
def test_in_a_checkpointed_layer_of_another_pipeline(schedule: dict[str, Any]) -> None:
    plain, model = twins(mlp(4), "1f1b", 2, loss_fn=F.mse_loss, chunks=2)
    first = nn.Linear(4, 4)
    other = copy.deepcopy(first)
    outer = SplitPipe(nn.Sequential(first, Loss(model)), [1, 1], devices=["cpu"] * 2, checkpoint="always", **schedule)
    x, target = torch.randn(7, 4), torch.randn(7)
    loss = outer(x, target=target) if schedule else F.mse_loss(outer(x), target)
    F.mse_loss(nn.Sequential(other, Loss(plain))(x), target).backward()
    loss.backward()
    assert_same_tensors(model, plain)
    assert_same_tensors(first, other)
