"""The caller's state is set exactly, off as well as on, and put back exactly."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _autograd
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from splitpipe.core import thread_state


class Seen(TorchFunctionMode):
    """Keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """The same for dispatch modes."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def name(kind: str, x: Any) -> Any:
    return x


def hooks(kind: str = "") -> saved_tensors_hooks:
    return saved_tensors_hooks(partial(name, kind), partial(name, kind))


def found() -> dict[str, object]:
    """This thread's state, asked for piece by piece."""
    state: dict[str, object] = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "overrides": torch._C._is_torch_function_enabled(),
        "function modes": [id(mode) for mode in _get_current_function_mode_stack()],
        "dispatch modes": [id(mode) for mode in _get_current_dispatch_mode_stack()],
        "default device": torch.get_default_device(),
        "hooks disabled": _autograd._saved_tensors_hooks_get_disabled_error_message(),
    }
    state["hooks"] = [id(hook) for hook in _autograd._top_saved_tensors_default_hooks(True) or ()]
    return state


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextmanager
def together(*parts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        yield


autocast = partial(torch.autocast, "cpu")

SITUATIONS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad in inference": lambda: together(torch.inference_mode(), torch.enable_grad()),
    "autocast": partial(autocast, torch.bfloat16),
    "autocast float16 without cache": partial(autocast, torch.float16, cache_enabled=False),
    "autocast off in autocast": lambda: together(autocast(torch.float16), autocast(enabled=False)),
    "hooks": hooks,
    "hooks in hooks": lambda: together(hooks("outer"), hooks("inner")),
    "hooks disabled": partial(disable_saved_tensors_hooks, "not here"),
    "subclasses as tensors": torch._C.DisableTorchFunctionSubclass,
    "mode": Seen,
    "modes": lambda: together(Seen(), Seen()),
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "device and mode": lambda: together(default_device(), Seen(), torch.device("cpu")),
    "dispatch": Dispatched,
    "dispatch modes": lambda: together(Dispatched(), Dispatched()),
    "fake": FakeTensorMode,
    "fake and dispatch": lambda: together(Dispatched(), FakeTensorMode(), Dispatched()),
    "everything": lambda: together(
        torch.no_grad(), autocast(torch.float16), hooks(), Seen(), torch.device("meta"), FakeTensorMode(), Dispatched()
    ),
}
situations = pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)


@situations
def test_any_state_is_entered_from_any_other_and_restored(
    situation: Callable[[], AbstractContextManager[object]]
) -> None:
    with situation():
        state, expected = thread_state.capture(), found()
    start = found()
    for name, there in SITUATIONS.items():
        with there():
            before = found()
            with thread_state.entered(state):
                assert found() == expected, name
            assert found() == before, name
            with pytest.raises(KeyboardInterrupt), thread_state.entered(state):
                assert found() == expected, name
                raise KeyboardInterrupt
            assert found() == before, name
        assert found() == start, name


def test_hooks_of_a_checkpoint_are_known_as_such_after_the_block_that_entered_them() -> None:
    """Since torch 2.14 it looks through its own hooks to the user's outside of them, which it notes in the block alone.
    """
    def pack(x: Tensor) -> Tensor:
        return x

    pack._checkpoint_internal, pack._user_hooks = True, hooks()  # type: ignore[attr-defined]
    with saved_tensors_hooks(pack, pack):
        state = thread_state.capture()
        with thread_state.entered(state):
            assert _autograd._top_saved_tensors_default_hooks(True) == (pack, pack)
    del pack._user_hooks  # type: ignore[attr-defined]
    with thread_state.entered(state):
        found, unpack = _autograd._top_saved_tensors_default_hooks(True)
        assert (found._checkpoint_internal, found._user_hooks, unpack) == (True, None, pack)
        x = torch.ones(2)
        assert found(x) is x


def casts(weight: Tensor, times: int) -> int:
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with Dispatched() as mode:
        for _ in range(times):
            assert F.linear(x, weight).dtype == torch.bfloat16
    return mode.functions.count(torch.ops.aten._to_copy.default)


@pytest.mark.parametrize("cache", [True, False])
def test_casts_are_kept_to_the_end_of_the_block_as_autocast_keeps_them(cache: bool) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with autocast(torch.bfloat16, cache_enabled=cache):
        state = thread_state.capture()
    for _ in range(2):
        with thread_state.entered(state):
            with autocast(torch.bfloat16, cache_enabled=cache):
                first = casts(weight, 2)
            assert (first, casts(weight, 2)) == ((1, 0) if cache else (2, 2))


def test_hooks_and_modes_observe_and_a_default_device_does_not() -> None:
    observed = {}
    for kind, situation in SITUATIONS.items():
        with situation():
            observed[kind] = thread_state.capture().observed
    quiet = {
        "nothing", "no_grad", "inference", "grad in inference", "autocast", "autocast float16 without cache",
        "autocast off in autocast", "hooks disabled", "subclasses as tensors", "device", "default device",
    }
    assert {kind for kind, value in observed.items() if not value} == quiet


def test_what_is_unobserved_is_seen_by_no_mode() -> None:
    mode, dispatched = Seen(), Dispatched()
    with torch.device("meta"), FakeTensorMode(), dispatched, mode:
        before = found()  # From torch 2.15 on it makes a tensor, to know the default device.
        mode.functions.clear()
        dispatched.functions.clear()
        with thread_state.unobserved():
            x = torch.ones(2)
        assert mode.functions == dispatched.functions == []
        assert (x.device.type, type(x)) == ("cpu", Tensor)
        with pytest.raises(KeyError), thread_state.unobserved():
            raise KeyError
        assert found() == before
