"""Layers that a pipeline compiles. Their calls are in nn.Module's slot for compiled calls, as with ``layer.compile()``.

Equal layers share one function to compile, and torch's guards tell whether they also share the compiled code: of 24
equal blocks, one is compiled. Code that torch can't trace runs as it is, as with ``layer.compile()``.

torch.compile isn't thread-safe (pytorch#118260, #168042): if a layer is compiled, by a pipeline or by the user, all ops
of a call run in the caller's thread.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from splitpipe.compiled.backend import Backend, CompileOptions
from splitpipe.core.torch_private import _has_any_global_hook

#: Each is a single op, whose weight gradient is deferred anyway.
_ONE_OP = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
#: Settings of torch's compiler: enough graphs for equal layers in all modes and batch sizes; hooks that are added later
#: are seen; and a number that a layer counts may have any value, rather than a graph for each.
_SETTINGS = {
    "recompile_limit": 16, "skip_nnmodule_hook_guards": False, "allow_unspec_int_on_nn_module": True,
}


class Compiler:
    """Compiles the layers of one model; without options, it leaves them as they are. ``halves``: of the backward."""

    def __init__(self, options: CompileOptions | None, halves: bool = True) -> None:
        self._options = options
        self._halves = halves
        self._functions: dict[Any, Callable[..., Any]] = {}

    def compile(self, layers: Iterable[nn.Module]) -> None:
        """Makes layers run compiled from now on, unless they already do, or the user has compiled them."""
        if (options := self._options) is None:
            return
        from splitpipe.compiled.torch_private import config

        for layer in layers:
            if compiled_call(layer) is None and fit(layer):
                kind = type(layer), tuple([(name, x.shape) for name, x in layer.named_parameters()])
                if kind not in self._functions:
                    # Torch keeps graphs with the code object, and compiled code in the globals: each kind of layer has
                    # its own. It is made from text, in which tools that measure code put nothing that would be traced.
                    call = eval("lambda layer, args, kwargs: layer._call_impl(*args, **kwargs)", {})
                    backend = Backend(options, self._halves)
                    compiled: Any = torch.compile(call, backend=backend, dynamic=options.dynamic)
                    self._functions[kind] = config.patch(_SETTINGS)(compiled)
                _set_compiled_call(layer, CompiledCall(layer, self._functions[kind]))


class CompiledCall:
    """The call of one layer. It isn't copied with the layer: copies of it are None."""

    __slots__ = ("_function", "_layer")

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        self._layer = weakref.ref(layer)  # The layer refers to this.
        self._function = function

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        if _has_any_global_hook():  # Torch wouldn't notice new hooks of all modules.
            return layer._call_impl(*args, **kwargs)
        return self._function(layer, args, kwargs)


def release(module: nn.Module) -> None:
    """Makes everything in a module that a pipeline has compiled run uncompiled again."""
    for part in module.modules():
        if isinstance(compiled_call(part), CompiledCall):
            _set_compiled_call(part, None)


def compiled_call(layer: nn.Module) -> Any:
    """A layer's compiled call, by a pipeline or by ``layer.compile()``; None if it isn't compiled."""
    slot: Any = layer._compiled_call_impl
    return getattr(slot, "compiled", slot)  # A block's call hook may be in the slot, with the compiled call inside.


def is_compiled(code: object) -> bool:
    """True for a module or function that is compiled, by torch.compile, module.compile() or a pipeline."""
    inner = getattr(code, "func", code)  # Of a partial.
    whole = hasattr(inner, "_torchdynamo_orig_callable") or type(inner).__name__ == "OptimizedModule"
    return whole or isinstance(inner, nn.Module) and compiled_call(inner) is not None


def _set_compiled_call(layer: nn.Module, call: CompiledCall | None) -> None:
    slot: Any = layer._compiled_call_impl
    if hasattr(slot, "compiled"):
        slot.compiled = call
    else:
        vars(layer)["_compiled_call_impl"] = call


def fit(layer: nn.Module) -> bool:
    """True if compiling gains something: several ops, or one whose weight gradient is only deferred if compiled."""
    # Torch.compile loses writes to a buffer with a single number, which it treats as Python's.
    lost = [x for x in layer.buffers() if x.dim() == 0 and x.dtype is torch.float64 and x.device.type == "cpu"]
    if lost or type(layer).__name__ == "OptimizedModule":
        return False
    if next(layer.children(), None) is not None or not type(layer).__module__.startswith("torch.nn."):
        return True
    return next(layer.parameters(), None) is not None and not isinstance(layer, _ONE_OP)
