"""The code that torch.compile traces around a layer, in a file that no tool measures: the compiler would trace that."""
from __future__ import annotations

from typing import Any

from torch import nn


def call_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a layer with its hooks, as it would be called without a compiler."""
    return layer._call_impl(*args, **kwargs)
