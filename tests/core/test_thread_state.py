"""The caller's settings are set exactly, off as well as on, and put back exactly; with others, its thread is odd."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._C import _autograd
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
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


def hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def settings() -> dict[str, object]:
    """What of this thread's state is moved, asked for piece by piece."""
    devices = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "default device": devices[-1].device if devices else None,
    }


def the_rest() -> list[object]:
    """Modes and hooks, which are not."""
    return [
        *[mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)],
        *_get_current_dispatch_mode_stack(),
        *(_autograd._top_saved_tensors_default_hooks(True) or ()),
    ]


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
    "autocast off in autocast": lambda: together(autocast(torch.float16), autocast(enabled=False)),
    "hooks": hooks,
    "mode": Seen,
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "device in a device": lambda: together(default_device(), torch.device("cpu")),
    "dispatch": Dispatched,
    "fake": FakeTensorMode,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "everything": lambda: together(
        torch.no_grad(), autocast(torch.float16), hooks(), Seen(), torch.device("meta"), FakeTensorMode(), Dispatched()
    ),
}
situations = pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)


#: What is moved; everything else makes a call odd.
MOVED = {
    "nothing", "no_grad", "inference", "grad in inference", "autocast",
    "autocast off in autocast", "device", "default device", "device in a device",
}


@situations
def test_settings_are_entered_from_any_state_and_restored(
    situation: Callable[[], AbstractContextManager[object]]
) -> None:
    with situation():
        state, expected = thread_state.capture(), settings()
    start = settings(), the_rest()
    for name, there in SITUATIONS.items():
        with there():
            before = settings(), the_rest()
            with thread_state.entered(state):
                assert (settings(), the_rest()) == (expected, before[1]), name
            assert (settings(), the_rest()) == before, name
            with pytest.raises(KeyboardInterrupt), thread_state.entered(state):
                raise KeyboardInterrupt
            assert (settings(), the_rest()) == before, name
        assert (settings(), the_rest()) == start, name


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_thread_is_odd_by_what_no_other_one_gets(name: str) -> None:
    with SITUATIONS[name]():
        assert thread_state.capture().odd is (name not in MOVED)
