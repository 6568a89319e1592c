"""Modules with cuts on three devices, trained drop-in and by a schedule."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe

from .modules import WIDTH, cuts
from .subjects import mean

DEVICES = ["cuda:0", "cuda:1", "cuda:2"]
BOTH = pytest.mark.parametrize("way", [{}, {"schedule": "1f1b", "loss_fn": mean}], ids=["drop-in", "1f1b"])


def wrapped(module: nn.Module, **options: Any) -> SplitPipe:
    return SplitPipe(module, **{"cuts": cuts(3), "devices": DEVICES, "chunks": 2, **options})


def batch() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(DEVICES[0])


def trained(model: SplitPipe, *values: Tensor, target: Any = DEVICES[-1]) -> None:
    """A step, drop-in or scheduled, of ``batch`` if no values are given, with a target on that device."""
    values = values or (batch(),)
    if model.schedule.name == "gpipe":
        mean(model(*values), 1.0).backward()
    else:
        model(*values, target=torch.ones(4, device=target)).backward()


def homes(model: nn.Module) -> dict[str, str]:
    """Where each parameter and buffer is, under each of its names."""
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    return {name: str(x.device) for name, x in named}
