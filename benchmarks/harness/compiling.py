"""How contenders' layers are compiled: all by inductor, each layer by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch._dynamo
from torch import nn

from splitpipe.compiled.layers import fit

#: As torch.compile and SplitPipe take it. What runs is C++ alone, without Python's lock, which stages of one process
#: would pass to and fro.
COMPILED: dict[str, Any] = {"options": {"cpp_wrapper": True}}
#: Graphs of one function, of which torch has eight if it is not told: a model has more kinds of cells, whose forward
#: is one.
_KINDS = 64


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Has torch compile each layer that is more than one op, as SplitPipe(compile=) does, but by inductor alone.

    Not before the layers are balanced: hooks count their operations, and would be compiled with them.
    """
    torch._dynamo.config.recompile_limit = _KINDS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in filter(fit, layers):
        layer.compile(backend="inductor", **COMPILED)
