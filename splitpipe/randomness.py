"""Random numbers of a stage's microbatch, from a seed of its own: a seeded run repeats, and so does a recomputation.

The CPU's default generator belongs to the whole process. Worker threads that drew from it would interleave by luck,
and a recomputation would see other dropout masks than its first forward. So each (stage, microbatch) gets a seed,
and draws from it in the cheapest manner that is right for its stage, which its first runs find out:

    UNKNOWN ── drew nothing ──────────────> QUIET    runs free
       │
       └─ drew ─> DRAWS ── all was caught ─> SEEN    runs free; each random call swaps the generator's state
                    │
                    └─ some was not ───────> UNSEEN  runs alone, with the generator's state its own

The mode catches the random functions of torch. It can't see what compiled code draws, nor what a layer draws under
``no_grad`` or inside ``torch.utils.checkpoint``, which saves the generator's state itself and restores it later.

Guarantee: outside of the lock the default generator holds the state that the caller left in it. What would break it:
a swap without the lock, since the second of two threads would put back the first one's state.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _autograd
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from splitpipe.context import function_modes


class Manner(Enum):
    """How a stage draws, as far as its runs have shown."""

    UNKNOWN = "unknown"
    QUIET = "quiet"
    DRAWS = "draws"
    SEEN = "seen"
    UNSEEN = "unseen"

    @property
    def alone(self) -> bool:
        """Whether such a stage holds the lock while it runs."""
        return self not in (Manner.QUIET, Manner.SEEN)


class _Gate:
    """The process's lock on its default generator; a child of a fork gets one that nobody holds.

    It is reentrant: a layer that differentiates inside a checkpointed forward recomputes under the lock it holds.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def renew(self) -> None:
        self.lock = threading.RLock()


_gate = _Gate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_gate.renew)

# A stage that runs alone may be a pipeline itself. Its workers must not wait for the lock that is held for them.
_inner: ContextVar[_Gate | None] = ContextVar("splitpipe.randomness", default=None)


@contextmanager
def _own_state(state: Tensor) -> Iterator[None]:
    """Gives the default generator a state inside the block; nobody else draws meanwhile."""
    with (_inner.get() or _gate).lock:
        token = _inner.set(_Gate())
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            yield
        finally:
            torch.default_generator.set_state(kept)
            _inner.reset(token)


class Seeds:
    """The seeds of one pass, made from one number of the default generator, which it takes only if something drew.

    The seeds are numbers of another generator, seeded by that one. Taken from the default generator in a row, those
    of the next pass would be the same ones, shifted by one microbatch.
    """

    def __init__(self, stages: int, microbatches: int) -> None:
        self._before = torch.default_generator.get_state()
        generator = torch.Generator()
        generator.set_state(self._before)
        with _unobserved():
            generator.manual_seed(int(torch.randint(2**62, (), generator=generator, device="cpu")))
            count = max(1, stages * microbatches)
            self._seeds: list[int] = torch.randint(2**62, (count,), generator=generator, device="cpu").tolist()
        self._microbatches = microbatches
        self.drew = False

    def of(self, stage: int, microbatch: int) -> int:
        """The seed of one microbatch on one stage."""
        return self._seeds[stage * self._microbatches + microbatch]

    def settle(self) -> bool:
        """Moves the default generator on if something drew; False if something drew that nobody watched."""
        watched = not _moved(self._before)
        if self.drew:
            with _unobserved():
                torch.randint(2**62, (), generator=torch.default_generator, device="cpu")
        return watched


@dataclass(frozen=True)
class Run:
    """A run's value, whether it drew, and in which manner the next run is to draw."""

    value: Any
    drew: bool
    manner: Manner


def run(call: Callable[[], Any], seed: int, manner: Manner) -> Run:
    """Runs the call with random numbers from the seed.

    The numbers are the same in every manner: a run that finds the manner out is no other than those after it.
    """
    if manner is Manner.QUIET:
        return Run(call(), False, manner)
    generator = torch.Generator()
    generator.manual_seed(seed)
    if not manner.alone:
        swapping = _Swapping(generator)
        return Run(swapping.watch(call), swapping.drew, manner)
    start = generator.get_state()
    with _own_state(start):
        if manner is Manner.DRAWS:
            witness = _Witness(start)
            value = witness.watch(call)
            return Run(value, _moved(start), Manner.SEEN if witness.saw_all() else Manner.UNSEEN)
        value = call()
        drew = _moved(start)
        if manner is Manner.UNKNOWN:
            manner = Manner.DRAWS if drew else Manner.QUIET
        return Run(value, drew, manner)


def _moved(state: Tensor) -> bool:
    """Whether the default generator has drawn since it had this state."""
    with _unobserved():
        return not torch.equal(state, torch.default_generator.get_state())


@contextmanager
def _unobserved() -> Iterator[None]:
    """Hides what the block does from the user's function and dispatch modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _Catching(TorchFunctionMode):
    """Sees the random functions that are called for CPU tensors, as they are called by the layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)
        self._grad = torch.is_grad_enabled()

    def watch(self, call: Callable[[], Any]) -> Any:
        """Runs the call under this mode, outermost: the user's modes see every function before it does."""
        stack = tuple(_get_current_function_mode_stack())
        with function_modes(stack, (self, *stack)):
            return call()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # Written in Python: its body draws, one function further down.
                return torch._C._skip_one_hop_torch_function(func, types, args, kwargs)
        if func not in _RANDOM or kwargs.get("generator") is not None or not self._mine(args):
            return func(*args, **kwargs)
        return self.draw(lambda: func(*args, **kwargs))

    def _mine(self, args: tuple[Any, ...]) -> bool:
        if args and isinstance(args[0], Tensor) and args[0].device.type != "cpu":
            return False  # Drawn by the device's generator, which has one worker.
        return (
            torch.is_grad_enabled() == self._grad and _autograd._top_saved_tensors_default_hooks(True) == self._hooks
        )

    def draw(self, call: Callable[[], Any]) -> Any:
        """Runs one random function."""
        return call()


class _Swapping(_Catching):
    """Each random function draws from the microbatch's own generator, which takes the default one's place for it."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self.drew = False

    def draw(self, call: Callable[[], Any]) -> Any:
        self.drew = True
        with _own_state(self._generator.get_state()):
            try:
                return call()
            finally:
                self._generator.set_state(torch.default_generator.get_state())


class _Witness(_Catching):
    """Finds out whether the default generator moves in random functions alone."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self._last = start
        self._missed = False

    def draw(self, call: Callable[[], Any]) -> Any:
        self.saw_all()
        try:
            return call()
        finally:
            self._last = torch.default_generator.get_state()

    def saw_all(self) -> bool:
        """Whether nothing has drawn unseen so far."""
        self._missed = self._missed or _moved(self._last)
        return not self._missed


def _functions(owner: object, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


_RANDOM = frozenset([
    *_functions(F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax "
                   "scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d"),
    *_functions(torch, "dropout dropout_ native_dropout feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
                       "feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ rand randn randint rand_like randn_like "
                       "randint_like randperm bernoulli multinomial normal poisson binomial"),
    *_functions(torch._VF, "lstm gru rnn_tanh rnn_relu"),
    *_functions(Tensor, "bernoulli bernoulli_ normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_ "
                        "multinomial"),
])


class DeviceState:
    """The state of an accelerator's generator at the start of a microbatch; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._state = None if self._module is None else self._module.get_rng_state(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draws inside the block repeat those since the state was taken; after it the generator is as before."""
        if self._module is None:
            yield
            return
        kept = self._module.get_rng_state(self._device)
        self._module.set_rng_state(self._state, self._device)
        try:
            yield
        finally:
            self._module.set_rng_state(kept, self._device)
