"""The MLP and the GPT that the split backward is measured on, in three sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.gpt import gpt
from benchmarks.models.mlp import mlp


@dataclass(frozen=True)
class Preset:
    """The sizes of both models."""

    narrow: int
    wide: int
    linears: int
    mlp_rows: int
    width: int
    heads: int
    blocks: int
    context: int
    gpt_rows: int
    dtype: torch.dtype = torch.float32


PRESETS = {
    "tiny": Preset(4, 8, 4, 8, 8, 2, 2, 4, 4),
    "small": Preset(512, 2048, 8, 1024, 256, 4, 6, 128, 64),
    "large": Preset(2048, 8192, 8, 8192, 1024, 16, 24, 1024, 32, torch.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """A model with a batch: what a step is made of."""

    layers: nn.Sequential
    input: Tensor
    target: Tensor

    def step(self, model: nn.Module) -> Callable[[], None]:
        """Forward, loss and backward, as a training loop does them."""
        first, last = next(self.layers.parameters()).device, list(self.layers.parameters())[-1].device
        x, y = self.input.to(first), self.target.to(last)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(x).flatten(0, -2), y).backward()

        return step


def case(name: str, preset: Preset, device: str) -> Case:
    """The same weights and the same batch every time."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = mlp(narrow=preset.narrow, wide=preset.wide, layers=preset.linears)
        x = torch.randn(preset.mlp_rows, preset.narrow, dtype=preset.dtype)
        y = torch.randint(preset.narrow, (preset.mlp_rows,))
    else:
        layers = gpt(
            context=preset.context, width=preset.width, heads=preset.heads, layers=preset.blocks, dropout=0.0
        )
        x = torch.randint(256, (preset.gpt_rows, preset.context))
        y = torch.randint(256, (preset.gpt_rows * preset.context,))
    return Case(layers.to(device, preset.dtype), x, y)
