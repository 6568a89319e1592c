"""Losses of a batch that is the second dimension: as nn.Transformer has it, time first."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.covering import pairwise
from tests.helpers.twin import assert_same_tensors

TIME, WIDTH = 5, 4
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "sum of means over time": lambda x: x.mean(0).sum(),
    "mean of sums over time": lambda x: x.sum(0).mean(),
    "sum of means over rows": lambda x: x.mean(1).sum(),
    "sum of means over rows and width": lambda x: x.mean((0, 2)).sum(),
    "by the rows": lambda x: x.sum() / x.shape[1],
    "by the time": lambda x: x.sum() / x.shape[0],
    "by the length": lambda x: x.sum() / len(x),
    "without the first step": lambda x: x[1:].mean(),
    "of the first step": lambda x: x[0].sum() / x.shape[1],
}


class Timed(nn.Module):
    """Computes its own loss."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": self.loss((x - labels).square())}


@pairwise(options=[{}, {"schedule": "1f1b"}], name=[*LOSSES], rows=[6, 8])
def test_an_own_loss_is_that_of_a_batch_along_the_second_dimension(
    options: dict[str, Any], name: str, rows: int
) -> None:
    plain = Timed(LOSSES[name]).double()
    model = SplitPipe(
        copy.deepcopy(plain), cuts=["layers.2"], devices=["cpu"] * 2, chunks=3, batched={"x": 1, "labels": 1}, **options
    )
    x, y = torch.randn(2, TIME, rows, WIDTH, dtype=torch.float64).unbind()
    for _ in range(2):
        found, expected = model(x, labels=y)["loss"], plain(x, y)["loss"]
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("rows", [6, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_function_has_the_batch_along_the_second_dimension(name: str, rows: int) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return LOSSES[name]((output - target).square())

    model = SplitPipe(
        copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=3, batched=1, schedule="1f1b", loss_fn=loss_fn
    )
    x, y = torch.randn(2, TIME, rows, WIDTH, dtype=torch.float64).unbind()
    found, expected = model(x, target=y), loss_fn(plain(x), y)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert_same_tensors(model, plain)
