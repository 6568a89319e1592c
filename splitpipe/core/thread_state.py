"""The caller's thread-local state, captured once per call and set exactly in every thread that works for it.

Exactly means that what is off is turned off, and what is on is turned on. A recomputation runs inside the user's
backward, where autocast may be on though the forward ran without it, or vice versa.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from splitpipe.core.torch_private import (
    DeviceContext,
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    SharedPointer,
    TorchDispatchMode,
    _DisableAutocast,
    _EnableTorchFunction,
    _get_current_dispatch_mode_stack,
    _get_current_function_mode_stack,
    _is_any_autocast_enabled,
    _is_torch_function_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_mode,
    _pop_saved_tensors_default_hooks,
    _pop_torch_function_stack,
    _profiler_enabled,
    _push_mode,
    _push_on_torch_function_stack,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message,
    _set_grad_enabled,
    _top_saved_tensors_default_hooks,
    profiler_state,
)

_NOTHING = nullcontext()
Pack = Callable[[torch.Tensor], Any]
Hooks = tuple[Pack, Callable[[Any], torch.Tensor]]


class State(NamedTuple):
    """A thread's torch settings. Context variables are passed separately, one ``Context`` per microbatch."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    #: True if subclasses of Tensor see torch's functions; inside their own backward(), they don't.
    overrides: bool
    hooks: Hooks | None
    hooks_disabled: str | None
    function_modes: tuple[TorchFunctionMode, ...]
    dispatch_modes: tuple[TorchDispatchMode, ...]

    @property
    def observed(self) -> bool:
        """True if user code runs inside ops: hooks or modes, which see the ops of one thread at a time.

        ``torch.utils.checkpoint`` around a pipeline numbers saved tensors in the order of its pack hook's calls; stages
        that save in two threads at the same time would get each other's tensors back.
        """
        modes = [mode for mode in self.function_modes if not isinstance(mode, DeviceContext)]
        return bool(self.hooks or modes or self.dispatch_modes)


#: The last four fields of a state without hooks and modes.
_UNOBSERVED = (None, None, (), ())


def capture() -> State:
    """The state of this thread."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    # If hooks are disabled, there is a message, and the stack can't be read.
    message = _saved_tensors_hooks_get_disabled_error_message()
    return State(  # Positional: each microbatch on each stage makes one, and names would take another microsecond.
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]),
        torch.is_autocast_cache_enabled(),
        _is_torch_function_enabled(),
        _top_saved_tensors_default_hooks(True) if message is None else None,
        message,
        tuple(_get_current_function_mode_stack()) if _len_torch_function_stack() else (),
        tuple(_get_current_dispatch_mode_stack()) if _len_torch_dispatch_stack() else (),
    )


def autocast_off(state: State) -> State:
    """The state outside forwards: autocast is off, as in the user's backward."""
    if not any(enabled for _, enabled, _ in state.autocast):
        return state
    return state._replace(autocast=tuple((kind, False, dtype) for kind, _, dtype in state.autocast))


class entered:
    """Sets this thread's state to the captured one inside the block, and restores it afterwards."""

    __slots__ = ("_grad", "_stack", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        now, state = capture(), self._state
        self._grad = now.grad
        # Usually, the state is this thread's own except for grad mode, as in a recomputation.
        if state[5:] == _UNOBSERVED and now[1:] == state[1:]:
            if now.grad != state.grad:
                _set_grad_enabled(state.grad)
            return
        with ExitStack() as stack:
            _enter(stack, now, state)
            self._stack = stack.pop_all()

    def __exit__(self, *exc_info: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
            return
        if _len_torch_function_stack():
            set_function_modes(())  # A layer has left one there, which would see the next line.
        if self._grad != torch.is_grad_enabled():
            _set_grad_enabled(self._grad)


def _enter(stack: ExitStack, now: State, state: State) -> None:
    if now.overrides != state.overrides:
        stack.enter_context(_EnableTorchFunction() if state.overrides else DisableTorchFunctionSubclass())
    # A function mode sees set_grad_enabled: neither this thread's modes nor the captured ones should see ours.
    stack.enter_context(function_modes(now.function_modes, ()))
    if now.inference != state.inference:
        stack.enter_context(torch.inference_mode(state.inference))
    if now.autocast != state.autocast or now.autocast_cache != state.autocast_cache:
        # torch.autocast isn't used: it warns about dtypes for which the caller has already been warned.
        torch.autocast_increment_nesting()
        stack.callback(_leave_autocast, now)
        _set_autocast(state)
    if now.hooks_disabled != state.hooks_disabled or _ids(now.hooks) != _ids(state.hooks):
        # Only the innermost pair is ever called, so it represents the caller's whole stack.
        before = _set_hooks([] if state.hooks is None else [state.hooks], state.hooks_disabled)
        stack.callback(_set_hooks, before, now.hooks_disabled)
    if _ids(now.dispatch_modes) != _ids(state.dispatch_modes):
        stack.enter_context(_dispatch_modes(now.dispatch_modes, state.dispatch_modes))
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    torch.set_grad_enabled(state.grad)
    stack.enter_context(function_modes((), state.function_modes))


def _ids(values: Sequence[object] | None) -> list[int]:
    # Not by comparing values: modes and hooks may define equality, and be equal to others.
    return [id(value) for value in values or ()]


def _set_autocast(state: State) -> None:
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)


def _leave_autocast(before: State) -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _set_autocast(before)


def without_autocast() -> AbstractContextManager[object]:
    """Turns autocast off inside the block, for all device types."""
    return _DisableAutocast() if _is_any_autocast_enabled() else _NOTHING


def _set_hooks(pairs: Sequence[Hooks], disabled: str | None) -> list[Hooks]:
    """Makes the pairs the stack of saved-tensor hooks, outermost first, or disables it; returns the previous pairs."""
    _saved_tensors_hooks_enable()
    before: list[Hooks] = []
    while (top := _top_saved_tensors_default_hooks(True)) is not None:
        before.insert(0, top)
        _pop_saved_tensors_default_hooks()
    for pack, unpack in pairs:
        _push_saved_tensors_default_hooks(_lasting(pack), unpack)
    if disabled is not None:
        _saved_tensors_hooks_disable(disabled, False)
    return before


def _lasting(pack: Pack) -> Pack:
    """The pack hook, usable on the stack after the block that entered it has ended, as in a recomputation.

    Since torch 2.14, torch.utils.checkpoint looks past its own hooks on the stack for the user's hooks around them. It
    stores these on the pack hook, but only inside the block. In backward, it finds none there, and so none here.
    """
    if not getattr(pack, "_checkpoint_internal", False) or hasattr(pack, "_user_hooks"):
        return pack

    def packed(x: torch.Tensor) -> Any:
        return pack(x)

    packed._checkpoint_internal = True  # type: ignore[attr-defined]
    packed._user_hooks = None  # type: ignore[attr-defined]
    return packed


@contextmanager
def function_modes(now: Sequence[TorchFunctionMode], then: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Replaces the stack of function modes, outermost first, without entering any: a mode may count its entries."""
    set_function_modes(then)
    try:
        yield
    finally:
        set_function_modes(now)


def outermost(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Adds a mode that sees every function, after the user's modes."""
    stack = tuple(_get_current_function_mode_stack())
    return function_modes(stack, (mode, *stack))


def set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Makes these this thread's function modes, outermost first."""
    # Regardless of what is there: set_default_device puts a mode on the stack and leaves it there.
    for _ in range(_len_torch_function_stack()):
        _pop_torch_function_stack()
    for mode in modes:
        _push_on_torch_function_stack(mode)


@contextmanager
def _dispatch_modes(now: Sequence[TorchDispatchMode], then: Sequence[TorchDispatchMode]) -> Iterator[None]:
    _set_dispatch_modes(then)
    try:
        yield
    finally:
        _set_dispatch_modes(now)


def _set_dispatch_modes(modes: Sequence[TorchDispatchMode]) -> None:
    for mode in reversed(_get_current_dispatch_mode_stack()):
        _pop_mode(getattr(mode, "_mode_key", None))
    for mode in modes:
        _push_mode(mode)


@contextmanager
def unobserved() -> Iterator[None]:
    """Hides what the block does from function and dispatch modes."""
    with DisableTorchFunction(), _dispatch_modes(_get_current_dispatch_mode_stack(), ()):
        yield


class Packed:
    """What a pack hook has made of a tensor."""

    def load(self) -> torch.Tensor:
        """The tensor."""
        raise NotImplementedError


def unchanged(x: torch.Tensor | Packed) -> torch.Tensor:
    """An unpack hook for tensors that are usually saved as they are. It is known, so its tensors may be read twice."""
    return x if isinstance(x, torch.Tensor) else x.load()


T = TypeVar("T")


class Profiled(Generic[T]):
    """A call that another thread makes under the profiler of this one, which waits for it."""

    __slots__ = ("_call", "_callbacks", "_info")

    def __init__(self, call: Callable[[], T]) -> None:
        assert profiler_state is not None
        self._call = call
        self._callbacks = profiler_state.get_callbacks()
        self._info: SharedPointer = profiler_state.get_info()

    def __call__(self) -> T:
        assert profiler_state is not None
        profiler_state.set_info(ctypes.addressof(self._info))
        profiler_state.set_callbacks(self._callbacks)
        try:
            return self._call()
        finally:
            nothing = SharedPointer()
            profiler_state.clear_callbacks()
            profiler_state.set_info(ctypes.addressof(nothing))


def profiled(call: Callable[[], T]) -> Callable[[], T]:
    """The call, under this thread's profiler if it has one."""
    return Profiled(call) if profiler_state is not None and _profiler_enabled() else call


class Bound(Generic[T]):
    """Binds the variable to the value inside the block, only for this context: cheaper than a generator."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> T:
        self._token: Token[T] = self._variable.set(self._value)
        return self._value

    def __exit__(self, *exc_info: object) -> None:
        self._variable.reset(self._token)
