"""Tensors that are sharded over processes: with one anywhere, all ops of a call run in the caller's thread.

Processes match collectives by the order of the calls, not by their purpose. So every process must call them in the same
order; with a thread per stage, the order would vary.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn


def is_dtensor(value: object) -> bool:
    """True for a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # If it isn't imported, there are no instances.
    return module is not None and isinstance(value, module.DTensor)


def wait_for_collectives(values: Iterable[Any]) -> None:
    """Waits for collectives whose results are dropped unread, as a recomputation's output: torch would keep them."""
    if "torch.distributed.tensor" in sys.modules:
        for x in values:
            pending = x.to_local() if is_dtensor(x) else x
            if hasattr(pending, "trigger_wait"):
                pending.trigger_wait()


def sharded(layers: Iterable[nn.Module]) -> bool:
    """True if any parameter or buffer is a DTensor."""
    return any(is_dtensor(x) for layer in layers for x in chain(layer.parameters(), layer.buffers()))
