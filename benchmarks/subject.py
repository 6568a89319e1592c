"""What compute.py trains: a GPT with a batch, in sizes that have a name, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import text
import torch
from models.gpt import gpt
from torch import Tensor, nn
from torch.nn import functional as F

#: One step of training. Gives the loss, or None in a process that does not see it.
Step = Callable[[], "float | None"]


@dataclass(frozen=True)
class Preset:
    """The sizes of the model and of a batch; four stages share the blocks evenly."""

    width: int
    heads: int
    blocks: int
    context: int
    rows: int


PRESETS = {
    "tiny": Preset(8, 2, 4, 4, 8),
    "small": Preset(256, 4, 8, 128, 32),
}


@dataclass(frozen=True)
class Case:
    """A model with a batch and the number of microbatches."""

    layers: nn.Sequential
    input: Tensor
    target: Tensor
    chunks: int

    def balance(self, stages: int) -> list[int]:
        """Layers a stage: the blocks evenly, the embedding with the first of them, the head with the last."""
        each = (len(self.layers) - 2) // stages
        return [each + (stage == 0) + (stage == stages - 1) for stage in range(stages)]


def case(preset: Preset, chunks: int) -> Case:
    """The same weights and the same batch every time."""
    torch.manual_seed(0)
    sizes = {"context": preset.context, "width": preset.width, "heads": preset.heads, "layers": preset.blocks}
    return Case(gpt(**sizes, dropout=0.0), *text.batch(text.load()[0], preset.rows, preset.context), chunks)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all bytes of a batch, or of a microbatch."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """As slow as it takes for the loss to fall smoothly, so that rounding does not grow from step to step."""
    return torch.optim.SGD(module.parameters(), lr=0.01)
