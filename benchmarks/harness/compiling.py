"""How contenders' layers are compiled: all by inductor, each layer by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch._dynamo
import torch._functorch.config
from torch import nn

#: As torch.compile and SplitPipe take it. What runs is C++ alone, without Python's lock, which stages of one process
#: would pass to and fro.
COMPILED: dict[str, Any] = {"options": {"cpp_wrapper": True}}
#: Graphs of one function, of which torch has eight if it is not told: a model has more kinds of cells, whose forward
#: is one.
_KINDS = 64


def gains(layer: nn.Module) -> bool:
    """Says if a layer is more than one op, or has weights whose gradients SplitPipe defers in compiled layers alone."""
    if next(layer.children(), None) is not None or not type(layer).__module__.startswith("torch.nn."):
        return True
    return next(layer.parameters(), None) is not None and not isinstance(layer, (nn.Linear, nn.Conv2d, nn.Embedding))


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Has torch compile the layers that gain by it, as SplitPipe(compile=) does, but by inductor alone.

    Not before the layers are balanced: hooks count their operations, and would be compiled with them.
    """
    torch._dynamo.config.recompile_limit = _KINDS
    # A layer that inductor fails at (a reduction cell's backward) runs as it is, as SplitPipe(compile=) has it.
    torch._dynamo.config.suppress_errors = True
    torch._functorch.config.force_non_lazy_backward_lowering = True
    for layer in filter(gains, layers):
        layer.compile(backend="inductor", **COMPILED)
