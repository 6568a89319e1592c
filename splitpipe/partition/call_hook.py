"""Intercepts calls of blocks, in nn.Module's slot for a compiled call: hooks surround it, no copy or pickle has it."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.compiled.layers import release
from splitpipe.core import stream, tensors
from splitpipe.core.torch_private import _current_graph_task_id

#: Runs the blocks that the code of this context calls, if set: ``take(block, call, args, kwargs)`` returns the value.
taker: ContextVar[Any] = ContextVar("splitpipe.taker", default=None)


class CallHook:
    """The call of a block, passed to the current handler; ``compiled``: the call that was in the slot before."""

    def __init__(self, block: nn.Module, compiled: Callable[..., Any] | None) -> None:
        self._block = weakref.ref(block)  # The block refers to this.
        self.compiled = compiled

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # Recurrent layers are copied with what is in the slot.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block: Any = self._block()
        call: Callable[..., Any] = block._call_impl if self.compiled is None else self.compiled
        if torch.compiler.is_exporting():  # The compiler can't trace the code below.
            return block._call_impl(*args, **kwargs)
        if (handler := taker.get()) is not None:
            return handler.take(block, call, args, kwargs)
        if _current_graph_task_id() >= 0:  # In a backward: torch.utils.checkpoint runs it again.
            args, kwargs = _brought(block, (args, kwargs))
        return call(*args, **kwargs)


def _brought(block: nn.Module, value: Any) -> Any:
    """Arguments with their tensors on the device of a block, if they are on another one of its type."""
    device = next((x.device for x in block.parameters()), torch.device("cpu"))

    def bring(x: Tensor) -> Tensor:
        if x.device == device or x.device.type != device.type:
            return x
        stream.hold(x, stream.current(x.device))  # The backward's thread uses other streams.
        return x.to(device)

    return tensors.map_tensors(bring, value)


def surround(block: nn.Module) -> None:
    """Intercepts the block's calls from now on. Call it again if the user may have compiled the block since."""
    slot = vars(block).get("_compiled_call_impl")
    if not isinstance(slot, CallHook):
        vars(block)["_compiled_call_impl"] = CallHook(block, slot)


def expose(module: nn.Module) -> None:
    """Restores all calls in a module to what they were before a pipeline intercepted or compiled them."""
    release(module)
    for part in module.modules():
        slot = vars(part).pop("_compiled_call_impl", None)
        before = slot.compiled if isinstance(slot, CallHook) else slot
        if before is not None:
            vars(part)["_compiled_call_impl"] = before
