"""Compiled layers in one backward pass over several accelerators.

The backward of a compiled call runs in the context variables of the caller of backward(), and the threads of all
devices share that Context, but only one at a time can enter it: torch raises "cannot enter context" (pytorch#185372).
So each such node gets a copy before it runs. The engine gives every node its caller's own again. From torch 2.14 on,
torch does this itself.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.graph import Edge, reached
from splitpipe.core.stream import Stream
from splitpipe.core.torch_private import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls

#: True if torch makes two devices enter one context.
NEEDED = torch.__version__ < "2.14"
#: Torch's name for the nodes.
_NODE = "CompiledFunctionBackward"


def part(computes: Sequence[Stream], inputs: Iterable[Any], outputs: Iterable[Any]) -> None:
    """Makes each compiled node between a drop-in call's inputs and outputs run backward in a separate context.

    ``computes``: the streams of the call's stages.
    """
    if not NEEDED or len({stream.device for stream in computes if stream is not None}) < 2:
        return
    for node in reached(_edges(outputs), _edges(inputs)).nodes:
        if type(node).__name__ == _NODE:
            node.register_prehook(_own)


def _edges(values: Iterable[Any]) -> list[Edge]:
    return [(x.grad_fn, x.output_nr) for x in values if isinstance(x, Tensor) and x.grad_fn is not None]


def _own(gradients: object) -> None:
    context = _get_obj_in_tls("context") if _is_key_in_tls("context") else None
    if context is not None:
        _stash_obj_in_tls("context", context.copy())
