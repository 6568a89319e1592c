"""What a thread has of the caller's state, and of random numbers: all of it, exactly, and given back."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from splitpipe.core import thread_state
from splitpipe.core.random_numbers import RNGStates


def settings() -> tuple[dict[str, object], list[object]]:
    """What of this thread's state is moved, asked for piece by piece; and its modes and hooks, which are not."""
    modes = _get_current_function_mode_stack()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "default device": devices[-1] if devices else None,
    }, [*[mode for mode in modes if not isinstance(mode, DeviceContext)], *_get_current_dispatch_mode_stack(),
        *(_autograd._top_saved_tensors_default_hooks(True) or ())]


@contextmanager
def together(*parts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        yield


autocast = partial(torch.autocast, "cpu")
hooks = partial(saved_tensors_hooks, lambda x: x, lambda x: x)
Situations = dict[str, Callable[[], AbstractContextManager[object]]]
MOVED: Situations = {"nothing": nullcontext,
                     "no_grad": torch.no_grad,
                     "grad in inference": lambda: together(torch.inference_mode(), torch.enable_grad()),
                     "autocast": partial(autocast, torch.bfloat16, cache_enabled=False),
                     "autocast off in autocast": lambda: together(autocast(torch.float16), autocast(enabled=False)),
                     "device in a device": lambda: together(torch.device("meta"), torch.device("cpu"))}
#: What no other thread gets.
ODD: Situations = {
    "hooks": hooks,
    "function mode": BaseTorchFunctionMode,
    "dispatch mode": FakeTensorMode,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "everything": lambda: together(torch.no_grad(), autocast(torch.float16), hooks(), BaseTorchFunctionMode(),
                                   torch.device("meta"), FakeTensorMode()),
}
SITUATIONS = MOVED | ODD


@pytest.mark.parametrize("name", SITUATIONS)
def test_settings_are_entered_from_any_state_and_restored(name: str) -> None:
    with SITUATIONS[name]():
        state, (expected, _) = thread_state.capture(), settings()
        assert thread_state.is_odd() is (name in ODD)
    for where, there in SITUATIONS.items():
        with there():
            before = settings()
            with pytest.raises(KeyboardInterrupt), thread_state.use(state):
                assert settings() == (expected, before[1]), where
                raise KeyboardInterrupt
            assert settings() == before, where


def test_the_casts_of_weights_go_with_autocast() -> None:
    with autocast(torch.bfloat16):
        state = thread_state.capture()
    weight, found = nn.Parameter(torch.ones(1, 1)), []
    for _ in range(2):
        with thread_state.use(state):
            found.append(nn.functional.linear(torch.ones(1, 1), weight).item())
        weight.data += 1
    assert found == [1, 2]


CPU = torch.device("cpu")


def default() -> Tensor:
    return torch.default_generator.get_state()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_r_that_raises_leaves_the_generator(error: type[BaseException]) -> None:
    rng_states = RNGStates(CPU, True)
    first = torch.rand(3)
    torch.rand(5)  # Others draw meanwhile.
    before = default()
    with pytest.raises(error), rng_states.repeated():
        assert torch.equal(torch.rand(3), first)
        raise error
    assert torch.equal(default(), before)


@pytest.mark.cuda
def test_a_device_repeats_its_draws_and_is_as_it_was_after_also_with_another_seed() -> None:
    device = torch.device("cuda", 0)
    rng_states = RNGStates(device, False)
    first = torch.rand(9, device=device)
    torch.cuda.manual_seed(2**64 - 3)
    torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    with pytest.raises(KeyError), rng_states.repeated():
        assert torch.equal(torch.rand(9, device=device), first)
        raise KeyError
    assert torch.equal(torch.cuda.get_rng_state(device), before)
