"""The caller's thread-local state, captured once a pass and set exactly in every thread that works for it.

Exactly: what is off is switched off as well as what is on is switched on. A recomputation runs inside the user's
backward, where autocast may be on though the forward ran without it, and the other way round.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.overrides import TorchFunctionMode

# isort: off
from splitpipe.core.torch_private import (
    DeviceContext, DisableTorchFunction, DisableTorchFunctionSubclass, TorchDispatchMode, _DisableAutocast,
    _EnableTorchFunction, _get_current_dispatch_mode_stack, _get_current_function_mode_stack,
    _is_any_autocast_enabled, _is_torch_function_enabled, _len_torch_function_stack, _pop_mode,
    _pop_saved_tensors_default_hooks, _pop_torch_function_stack, _push_mode, _push_on_torch_function_stack,
    _push_saved_tensors_default_hooks, _saved_tensors_hooks_disable, _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message, _set_grad_enabled, _top_saved_tensors_default_hooks,
)

_NOTHING = nullcontext()
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, eq=False)
class State:
    """A thread's torch settings. Context variables travel apart, one ``Context`` a microbatch."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    hooks: Hooks | None
    hooks_disabled: str | None
    function_modes: tuple[TorchFunctionMode, ...]
    dispatch_modes: tuple[TorchDispatchMode, ...]
    #: Whether subclasses of Tensor see torch's functions: their own backward() runs without.
    overrides: bool

    @property
    def observed(self) -> bool:
        """Tells whether user code runs inside ops: hooks or modes, which see the ops of one thread at a time.

        ``torch.utils.checkpoint`` around a pipeline numbers saved tensors in the order of its pack hook's calls;
        stages that save in two threads at once would give each other's tensors back.
        """
        modes = [mode for mode in self.function_modes if not isinstance(mode, DeviceContext)]
        return bool(self.hooks or modes or self.dispatch_modes)


def capture() -> State:
    """The state of this thread."""
    # With hooks disabled there is a message, and the stack can't be asked for.
    message = _saved_tensors_hooks_get_disabled_error_message()
    return State(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _device_types()
        ),
        autocast_cache=torch.is_autocast_cache_enabled(),
        hooks=_top_saved_tensors_default_hooks(True) if message is None else None,
        hooks_disabled=message,
        function_modes=tuple(_get_current_function_mode_stack()),
        dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
        overrides=_is_torch_function_enabled(),
    )


def outside(state: State) -> State:
    """The state for what is no forward: autocast is off, as it is where the user goes backward."""
    if not any(enabled for _, enabled, _ in state.autocast):
        return state
    return replace(state, autocast=tuple((kind, False, dtype) for kind, _, dtype in state.autocast))


def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def entered(state: State) -> AbstractContextManager[None]:
    """Sets this thread's state to the captured one inside the block, and back to what it was after it."""
    return _Entered(state)


class _Entered:
    """Mostly the state is this thread's own but for grad mode, as in a recomputation: that is looked at first."""

    __slots__ = ("_grad", "_stack", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        state = self._state
        self._grad = torch.is_grad_enabled()
        if _but_for_grad(state):
            if self._grad != state.grad:
                _set_grad_enabled(state.grad)
            return
        now = capture()
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
        enable, disable = _EnableTorchFunction, DisableTorchFunctionSubclass
        stack.enter_context(enable() if state.overrides else disable())
    # A function mode sees set_grad_enabled: neither this thread's modes nor the captured ones are to see ours.
    stack.enter_context(function_modes(now.function_modes, ()))
    if now.inference != state.inference:
        stack.enter_context(torch.inference_mode(state.inference))
    if now.autocast != state.autocast or now.autocast_cache != state.autocast_cache:
        stack.enter_context(_autocast(now, state))
    if now.hooks_disabled != state.hooks_disabled or _ids(now.hooks) != _ids(state.hooks):
        stack.enter_context(_hooks(now, state))
    if _ids(now.dispatch_modes) != _ids(state.dispatch_modes):
        stack.enter_context(_dispatch_modes(now.dispatch_modes, state.dispatch_modes))
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    torch.set_grad_enabled(state.grad)
    stack.enter_context(function_modes((), state.function_modes))


def _but_for_grad(state: State) -> bool:
    """Tells whether state and thread agree in all but grad mode, and neither has a mode or hook."""
    return not (
        state.function_modes
        or state.dispatch_modes
        or state.hooks is not None
        or state.hooks_disabled is not None
        or state.inference
        or torch.is_inference_mode_enabled()
        or _len_torch_function_stack()
        or _is_torch_function_enabled() != state.overrides
        or _get_current_dispatch_mode_stack()
        or _saved_tensors_hooks_get_disabled_error_message() is not None
        or _top_saved_tensors_default_hooks(True) is not None
        or torch.is_autocast_cache_enabled() != state.autocast_cache
        or any(
            torch.is_autocast_enabled(kind) != enabled or torch.get_autocast_dtype(kind) != dtype
            for kind, enabled, dtype in state.autocast
        )
    )


def _ids(values: Sequence[object] | None) -> list[int]:
    # Not the values themselves: modes and hooks may define equality, and be equal to others.
    return [id(value) for value in values or ()]


@contextmanager
def _autocast(now: State, then: State) -> Iterator[None]:
    # Not torch.autocast: it warns of dtypes that the caller was warned of before.
    torch.autocast_increment_nesting()
    _set_autocast(then)
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_autocast(now)


def without_autocast() -> AbstractContextManager[object]:
    """Switches autocast off inside the block, for every type of device."""
    return _DisableAutocast() if _is_any_autocast_enabled() else _NOTHING


def _set_autocast(state: State) -> None:
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)


@contextmanager
def _hooks(now: State, then: State) -> Iterator[None]:
    if now.hooks_disabled is not None:
        _saved_tensors_hooks_enable()
    below = _pop_hooks()
    # Only the innermost pair is ever called, so it stands for the caller's whole stack.
    if then.hooks is not None:
        _push_saved_tensors_default_hooks(*then.hooks)
    if then.hooks_disabled is not None:
        _saved_tensors_hooks_disable(then.hooks_disabled)
    try:
        yield
    finally:
        _saved_tensors_hooks_enable()
        _pop_hooks()
        for pair in below:
            _push_saved_tensors_default_hooks(*pair)
        if now.hooks_disabled is not None:
            _saved_tensors_hooks_disable(now.hooks_disabled, False)


def _pop_hooks() -> list[Hooks]:
    """Empties the stack of hooks; gives them, outermost first."""
    hooks: list[Hooks] = []
    while (top := _top_saved_tensors_default_hooks(True)) is not None:
        hooks.insert(0, top)
        _pop_saved_tensors_default_hooks()
    return hooks


def function_modes(
    now: Sequence[TorchFunctionMode], then: Sequence[TorchFunctionMode]
) -> AbstractContextManager[None]:
    """Replaces the stack of function modes, outermost first, without entering any: a mode may count its entries."""
    return _FunctionModes(now, then)


def outermost(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Adds a mode that sees every function, after the user's modes."""
    stack = tuple(_get_current_function_mode_stack())
    return function_modes(stack, (mode, *stack))


class _FunctionModes:
    __slots__ = ("_now", "_then")

    def __init__(self, now: Sequence[TorchFunctionMode], then: Sequence[TorchFunctionMode]) -> None:
        self._now = now
        self._then = then

    def __enter__(self) -> None:
        set_function_modes(self._then)

    def __exit__(self, *exc_info: object) -> None:
        set_function_modes(self._now)


def set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Makes these this thread's function modes, outermost first."""
    # Whatever is there: set_default_device puts a mode on the stack and leaves it there.
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


def unobserved() -> AbstractContextManager[object]:
    """Hides what the block does from function and dispatch modes."""
    modes = _get_current_dispatch_mode_stack()
    return _unobserved(modes) if modes else DisableTorchFunction()


@contextmanager
def _unobserved(modes: list[TorchDispatchMode]) -> Iterator[None]:
    with DisableTorchFunction(), _dispatch_modes(modes, ()):
        yield


T = TypeVar("T")


class Bound(Generic[T]):
    """Binds the variable inside the block, for this context alone. Cheaper than a generator: entered for every op.

    Args:
        variable: to bind.
        value: that it has inside the block, which ``with`` gives.
    """

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> T:
        self._token: Token[T] = self._variable.set(self._value)
        return self._value

    def __exit__(self, *exc_info: object) -> None:
        self._variable.reset(self._token)


Phase = Literal["plain", "checkpointing", "recomputing"]
_phase: ContextVar[Phase] = ContextVar("splitpipe.phase", default="plain")


def in_phase(phase: Phase) -> Bound[Phase]:
    """Makes ``phase`` the answer inside the block, for this context alone."""
    return Bound(_phase, phase)


def is_checkpointing() -> bool:
    """Tells whether this forward is checkpointed: its saved tensors are dropped, and computed again in backward.

    Returns:
        True inside the first forward of a checkpointed microbatch, else False.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Tells whether this forward repeats an earlier one, in backward. A layer that counts its calls asks first.

    Returns:
        True inside the recomputation of a checkpointed microbatch, else False.

    Example:
        >>> class Counter(torch.nn.Module):
        ...     calls = 0
        ...     def forward(self, input):
        ...         self.calls += not is_recomputing()
        ...         return input
    """
    return _phase.get() == "recomputing"
