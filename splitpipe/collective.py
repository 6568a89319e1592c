"""Tensor parallelism inside a stage: layers whose parameters are DTensors talk to other processes while they run.

A collective goes together with that of another process by the order in which each asks for them, and not by what it
is for. So every process has to ask in the same order, which threads would not.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def sharded(layers: Iterable[nn.Module]) -> bool:
    """Whether any parameter or buffer is a DTensor: each of several processes has a part of it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # Not imported, it has no instance.
    return kind is not None and any(
        isinstance(x, kind) for layer in layers for held in (layer.parameters(), layer.buffers()) for x in held
    )


def wait(leaves: Iterable[Any]) -> None:
    """Waits for tensors that are still under way: torch keeps each until somebody does.

    Args:
        leaves: that nobody will read.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and type(leaf) is not Tensor:
            arriving = getattr(leaf, "_local_tensor", leaf)  # A DTensor's, or one that was taken out of it.
            if hasattr(arriving, "trigger_wait"):
                arriving.trigger_wait()
