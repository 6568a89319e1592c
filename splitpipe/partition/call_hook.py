"""Intercepts the calls of a module's blocks while the module runs as a pipeline.

A block's call goes through ``nn.Module``'s slot for a compiled call, which wraps the block's hooks and is left out of
copies and pickles. So no attribute of the block that its owner, ``state_dict`` or ``torch.save`` would see changes, and
a compiled block keeps its compiled call inside. Outside a pipeline's call, a block runs as before.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from splitpipe.compiled.layers import release
from splitpipe.compiled.theirs import Guard, user_compiled


class Taker(Protocol):
    """Runs the blocks that the code of this context calls."""

    def take(self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of the block's call."""


#: The handler of calls made in this context, if any.
taker: ContextVar[Taker | None] = ContextVar("splitpipe.taker", default=None)


class CallHook:
    """The call of a block, passed to the current handler; ``compiled``: the call that was in the slot before.

    Some blocks, such as recurrent layers, are copied with what is in the slot. A copy of this is None.
    """

    __slots__ = ("_block", "arriving", "compiled", "guard", "watch")

    def __init__(self, block: nn.Module, compiled: Callable[..., Any] | None) -> None:
        self._block = weakref.ref(block)  # The block refers to this.
        self.compiled = compiled
        #: Makes calls one at a time where torch may compile, if the block's user has compiled something in it.
        self.guard: Guard | None = None
        #: Brings arguments to the block's device if no handler is set: torch.utils.checkpoint runs the block again.
        self.arriving: Callable[[nn.Module, Any], Any] | None = None
        #: Makes the call of an attached module, and sees whether it ran as a pipeline.
        self.watch: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block: Any = self._block()
        if torch.compiler.is_exporting():  # The compiler can't trace the code below.
            return block._call_impl(*args, **kwargs)
        call: Callable[..., Any] = block._call_impl if self.compiled is None else self.compiled
        if self.guard is not None:
            call = partial(self.guard.call, call)
        if self.watch is not None:
            call = partial(self.watch, call)
        here = taker.get()
        if here is not None:
            return here.take(block, call, args, kwargs)
        if self.arriving is not None:
            args, kwargs = self.arriving(block, (args, kwargs))
        return call(*args, **kwargs)


def surround(block: nn.Module, may_be_compiled: bool = False) -> CallHook:
    """Intercepts the block's calls from now on. Call it again if the user may have compiled the block since."""
    slot = vars(block).get("_compiled_call_impl")
    made = slot if isinstance(slot, CallHook) else CallHook(block, slot)
    vars(block)["_compiled_call_impl"] = made
    made.guard = (made.guard or Guard()) if may_be_compiled and user_compiled(block) else None
    return made


def expose(module: nn.Module) -> None:
    """Restores all calls in a module to what they were before a pipeline intercepted or compiled them."""
    release(module)
    for part in module.modules():
        own = vars(part)
        slot = own.pop("_compiled_call_impl", None)
        if isinstance(slot, CallHook):
            slot = slot.compiled
        if slot is not None:
            own["_compiled_call_impl"] = slot
