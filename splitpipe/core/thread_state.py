"""The caller's thread-local state, captured once per call and set exactly in every thread that works for it.

Exactly means that what is off is turned off, and what is on is turned on. A recomputation runs inside the user's
backward, where autocast may be on though the forward ran without it, or vice versa.

A call whose thread has other state is odd: its ops run in that thread, one after another, and none of it is moved.
Function and dispatch modes, saved-tensor hooks and profilers gather what they see in one thread, in its order.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from splitpipe.core.torch_private import (
    DeviceContext,
    _get_current_function_mode_stack,
    _len_torch_dispatch_stack,
    _pop_torch_function_stack,
    _profiler_enabled,
    _push_on_torch_function_stack,
    _top_saved_tensors_default_hooks,
)

T = TypeVar("T")


class State(NamedTuple):
    """A thread's torch settings. Context variables are passed separately, one ``Context`` per microbatch."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: DeviceContext | None

    def outside_forward(self) -> State:
        """The state of B and W: grad mode and autocast are off."""
        return self._replace(grad=False, autocast=tuple([(kind, False, dtype) for kind, _, dtype in self.autocast]))


def capture() -> State:
    """The state of this thread."""
    accelerator, device = torch.accelerator.current_accelerator(), None
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    for mode in _get_current_function_mode_stack():
        device = mode if isinstance(mode, DeviceContext) else device  # The innermost counts.
    return State(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]),
        torch.is_autocast_cache_enabled(),
        device,
    )


def is_odd() -> bool:
    """True if this thread has state that no other one gets."""
    return (
        any([not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()])
        or _len_torch_dispatch_stack() > 0
        or _top_saved_tensors_default_hooks(True) is not None
        or _profiler_enabled()
        or isinstance(threading.current_thread(), threading._DummyThread)  # Not started by Python, as autograd's.
    )


@contextmanager
def use(state: State) -> Iterator[None]:
    """Sets this thread's state to the captured one inside the block, and restores it afterwards."""
    now = capture()
    if now[1:] == state[1:]:  # All but grad mode, as in a recomputation: the usual case, and faster.
        with torch.set_grad_enabled(state.grad):
            yield
        return
    with ExitStack() as stack:
        if now.default_device is not state.default_device:
            modes = _get_current_function_mode_stack()
            stack.callback(set_function_modes, modes)
            others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
            set_function_modes(others if state.default_device is None else [*others, state.default_device])
        for kind, enabled, dtype in state.autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled, state.autocast_cache))
        stack.enter_context(torch.inference_mode(state.inference))
        stack.enter_context(torch.set_grad_enabled(state.grad))
        yield


def set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Makes these this thread's function modes, outermost first, without entering any: a mode may count its entries."""
    for _ in _get_current_function_mode_stack():
        _pop_torch_function_stack()
    for mode in modes:
        _push_on_torch_function_stack(mode)


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Binds the variable to the value inside the block, only for this context."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
