"""Modules with a forward of their own, and one step of them beside that of their pipeline."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe import SplitPipe

#: Drop-in, and two schedules: the plain one, and one whose W are apart.
SCHEDULES = "gpipe", "1f1b", "zb-h1"
CHECKPOINTS = "never", "always"


class Stack(nn.Module):
    """Blocks in a list, whose outputs are kept and used later, with a loss of its own."""

    def __init__(self, blocks: int = 4, block: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        x, kept = self.first(x) * scale, []
        for layer in self.layers:
            kept.append(x)
            x = layer(x).tanh()
        y = self.last(x + kept[0])
        return {"loss": None if labels is None else (y - labels).square().mean(), "y": y, "hidden": tuple(kept)}


def batch(rows: int = 6) -> dict[str, Tensor]:
    """The arguments of a step of ``Stack``."""
    return {"x": torch.randn(rows, 4), "labels": torch.randn(rows, 4)}


def piped(module: nn.Module, cuts: list[str], **options: Any) -> SplitPipe:
    """A copy of the module as a pipeline of CPU stages, three microbatches if nothing else is said."""
    return SplitPipe(copy.deepcopy(module), cuts=cuts, **{"devices": ["cpu"] * (len(cuts) + 1), "chunks": 3, **options})
