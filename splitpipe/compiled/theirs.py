"""Layers that the user has compiled, whole or in parts, with any backend: calls that may compile run alone.

Torch doesn't announce that a call will compile. So a call with a new kind of arguments runs alone (see ``gate``), and
those of a known kind pass.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.compiled.gate import gate, gate_inside
from splitpipe.compiled.layers import CompiledCall, compiled_call
from splitpipe.core.generator import undisturbed
from splitpipe.core.torch_private import _is_any_autocast_enabled, tree_leaves

#: Above this number of kinds of arguments, calls pass: long before that, torch uses graphs for any size.
KINDS = 64
_NUMBERS = (bool, int, float, str, type(None))


class Guard:
    """The calls of one layer, and the kinds of arguments that it has been called with."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call, alone if it is of a new kind."""
        kind = _kind(args, kwargs)
        if kind in self._known or len(self._known) >= KINDS:
            with gate().passing(), gate_inside():
                return call(*args, **kwargs)
        from splitpipe.compiled.torch_private import graph_config

        # The backward is compiled with the forward, since nothing may be compiled in autograd's threads. The lock of
        # random numbers is explained in ``layers``.
        eager = graph_config.patch(force_non_lazy_backward_lowering=True)
        with undisturbed(), gate().alone(), gate_inside(), eager:
            found = call(*args, **kwargs)
        self._known.add(kind)
        return found


def guarded(layer: nn.Module) -> Callable[..., Any]:
    """The layer as a function, whose calls are guarded if something in it is compiled by the user."""
    return partial(Guard().call, layer) if user_compiled(layer) else layer


def user_compiled(module: nn.Module) -> bool:
    """True if the module, or a part of it, is compiled by the user."""
    return any(map(_theirs, module.modules()))


def _theirs(part: nn.Module) -> bool:
    call = compiled_call(part)
    return type(part).__name__ == "OptimizedModule" or call is not None and not isinstance(call, CompiledCall)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Equal for calls for which torch uses one graph, judging by their arguments; sizes are distinguished too."""
    leaves = tuple([
        _tensor(x) if isinstance(x, Tensor)
        else (type(x), x if isinstance(x, _NUMBERS) else None)
        for x in tree_leaves((args, kwargs))
    ])
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _is_any_autocast_enabled(), leaves


def _tensor(x: Tensor) -> Any:
    if x.layout is not torch.strided:
        return type(x), x.shape, x.dtype, x.device, x.requires_grad, x.layout
    # Torch guards on offsets, and distinguishes 0 and 1 from all others.
    return type(x), x.shape, x.dtype, x.device, x.requires_grad, x.stride(), min(x.storage_offset(), 2)
