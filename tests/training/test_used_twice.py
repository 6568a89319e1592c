"""Weights that a stage uses more than once, or in ways that are no plain use."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from splitpipe import SplitPipe


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear((x @ self.weight).tanh(), self.weight) * self.weight.sum()


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_computed_parameter_that_is_used_several_times_has_its_gradient_once(schedule: str, backward: Any) -> None:
    plain = nn.Sequential(Twice(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    weights = {name: p.detach().clone().requires_grad_() for name, p in plain.named_parameters()}

    def gradients(module: nn.Module, **more: Any) -> tuple[Tensor, ...]:
        found = functional_call(module, {name: weight * 0.5 for name, weight in weights.items()}, (x,), more)
        return torch.autograd.grad(found if more else F.mse_loss(found, y), list(weights.values()))

    model = SplitPipe(nn.Sequential(*plain), [1, 1], devices=["cpu"] * 2, chunks=3, schedule=schedule,
                      loss_fn=F.mse_loss, backward=backward, checkpoint="never")
    for one, other in zip(gradients(model, target=y), gradients(plain), strict=True):
        torch.testing.assert_close(one, other)


class Written(nn.Module):
    """Its weight is a view of a frozen parameter, written to in place by something that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 1))
        self.start = torch.randn(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        view = nn.Parameter(self.start.clone(), requires_grad=False)[:]
        view.mul_(self.scale)
        return F.linear(x, view)


@pytest.mark.parametrize("schedule", [None, "zb-h1"])
def test_a_view_that_was_written_to_in_place_is_left_to_autograd(schedule: str | None) -> None:
    plain, x, y = nn.Sequential(Written(), nn.Tanh()), torch.randn(6, 4), torch.randn(6, 4)
    options: dict[str, Any] = {} if schedule is None else {"schedule": schedule, "loss_fn": F.mse_loss}
    model = SplitPipe(nn.Sequential(*plain), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="never", **options)
    F.mse_loss(plain(x), y).backward()
    wanted, plain[0].scale.grad = plain[0].scale.grad, None
    (F.mse_loss(model(x), y) if schedule is None else model(x, target=y)).backward()
    torch.testing.assert_close(plain[0].scale.grad, wanted)
