"""A recording of a module with cuts counts bytes as that of a Sequential does."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splitpipe import SplitPipe


def test_the_bytes_of_stages_are_those_of_the_same_sequential() -> None:
    def recorded(module: nn.Module, **how: Any) -> Any:
        model = SplitPipe(
            module, devices=["cpu"] * 2, chunks=2, schedule="zb-h1", loss_fn=nn.functional.mse_loss, **how
        )
        x = torch.randn(4, 8)
        model(x, target=x)
        with model.record() as timeline:
            model(x, target=x)
        return timeline.held, timeline.kept

    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)
    assert recorded(Own(*layers), cuts=["2"]) == recorded(nn.Sequential(*layers), balance=[2, 1])
