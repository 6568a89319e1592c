"""What microbatches leave in a cache nobody could join: in training a module is told to keep none."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import attach


class Model(nn.Module):
    """Says whether it was to keep a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, use_cache: bool = True) -> tuple[Tensor, bool]:
        for layer in self.layers:
            x = layer(x)
        return x, use_cache


class Around(nn.Module):
    """Hands its keywords on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.model(x, **kwargs)


@pytest.mark.parametrize(("make", "cut"), [(Model, "layers.1"), (Around, "model.layers.1")])
def test_use_cache_is_false_in_training(make: type[nn.Module], cut: str) -> None:
    model, x = attach(make(), cuts=[cut], devices=["cpu"] * 2, chunks=2), torch.randn(4, 4)
    assert model(x)[1] is False
    assert model(x, use_cache=True)[1] is True
    assert model.eval()(x)[1] is True
