"""The caller's thread-local state, captured once per call and set exactly in every thread that works for it.

Exactly means that what is off is turned off, and what is on is turned on. A recomputation runs inside the user's
backward, where autocast may be on though the forward ran without it, or vice versa.

A call whose thread has other state is odd: its ops run in that thread, one after another, and none of it is moved.
Function and dispatch modes, saved-tensor hooks and profilers gather what they see in one thread, in its order.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar, Token
from typing import Generic, NamedTuple, TypeVar

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
    odd: bool  #: True if the thread has state that no other one gets.

    def outside_forward(self) -> State:
        """The state of B and W: grad mode and autocast are off."""
        return self._replace(grad=False, autocast=tuple([(kind, False, dtype) for kind, _, dtype in self.autocast]))


def capture() -> State:
    """The state of this thread."""
    return _settings(_kinds())._replace(odd=is_odd())


def _kinds() -> Sequence[str]:
    """The types of device of this machine."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _settings(kinds: Sequence[str]) -> State:
    """The state without what is odd, with the autocast of these types of device."""
    device: DeviceContext | None = None
    for mode in _get_current_function_mode_stack():
        device = mode if isinstance(mode, DeviceContext) else device  # The innermost counts.
    return State(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]),
        torch.is_autocast_cache_enabled(),
        device,
        False,
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


class use:
    """Sets this thread's state to the captured one inside the block, and restores it afterwards."""

    __slots__ = ("_grad", "_rest", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._rest: ExitStack | None = None

    def __enter__(self) -> None:
        state = self._state
        now = _settings([kind for kind, *_ in state.autocast])
        self._grad = now.grad
        if now[1:5] != state[1:5]:  # All but grad mode. Usually, they are equal, as in a recomputation.
            self._rest = stack = ExitStack()
            if now.default_device is not state.default_device:
                modes = _get_current_function_mode_stack()
                stack.callback(set_function_modes, modes)
                others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
                set_function_modes(others if state.default_device is None else [*others, state.default_device])
            if now.autocast != state.autocast or now.autocast_cache != state.autocast_cache:
                # torch.autocast isn't used: it warns about dtypes for which the caller has already been warned.
                torch.autocast_increment_nesting()
                stack.callback(_leave_autocast, now)
                _set_autocast(state)
            if now.inference != state.inference:
                stack.enter_context(torch.inference_mode(state.inference))
        torch.set_grad_enabled(state.grad)

    def __exit__(self, *exc_info: object) -> None:
        if self._rest is not None:
            self._rest.close()
        torch.set_grad_enabled(self._grad)


def _set_autocast(state: State) -> None:
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)


def _leave_autocast(before: State) -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _set_autocast(before)


def set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Makes these this thread's function modes, outermost first, without entering any: a mode may count its entries."""
    for _ in _get_current_function_mode_stack():
        _pop_torch_function_stack()
    for mode in modes:
        _push_on_torch_function_stack(mode)


class Bound(Generic[T]):
    """Binds the variable to the value inside the block, only for this context: cheaper than a generator."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> T:
        self._token: Token[T] = self._variable.set(self._value)
        return self._value

    def __exit__(self, *exc_info: object) -> None:
        self._variable.reset(self._token)
