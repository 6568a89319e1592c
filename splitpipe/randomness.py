"""Random numbers of a stage's microbatch, from a seed of its own: a seeded run repeats, and so does a recomputation.

The CPU's default generator belongs to the whole process. Worker threads that drew from it would interleave by luck,
and a recomputation would see other dropout masks than its first forward. So each (stage, microbatch) gets a seed,
and draws from it in the cheapest manner that is right for its stage, which its first runs find out:

    UNKNOWN ── called no random function ──> QUIET    runs free
       │
       ├─ what it drew was seen ───────────> SEEN     runs free; each random call swaps the generator's state
       │
       └─ some was not ────────────────────> UNSEEN   runs alone, with the generator's state its own

A function mode sees the random functions of torch. It can't see what compiled code draws, nor what a layer draws under
``no_grad``, after seeding, or inside ``torch.utils.checkpoint``, which saves and restores the generator's state itself.

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

from splitpipe.context import function_modes, unobserved


class Manner(Enum):
    """How a stage draws, as far as its runs have shown."""

    UNKNOWN = "unknown"
    QUIET = "quiet"
    SEEN = "seen"
    UNSEEN = "unseen"


class _Gate:
    """The process's lock on its default generator; a child of a fork gets one that nobody holds.

    It is reentrant: a layer that differentiates inside a checkpointed forward recomputes under the lock it holds.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def renew(self) -> None:
        self.lock = threading.RLock()


#: Seconds that a stage waits for its turn to draw, so that a layer in its own way is an error and no hang.
_PATIENCE = 600.0

_gate = _Gate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_gate.renew)

# A stage that runs alone may be a pipeline itself. Its workers must not wait for the lock that is held for them.
_inner: ContextVar[_Gate | None] = ContextVar("splitpipe.randomness", default=None)


@contextmanager
def _own_state(state: Tensor) -> Iterator[None]:
    """Gives the default generator a state inside the block; nobody else draws meanwhile."""
    lock = (_inner.get() or _gate).lock
    if not lock.acquire(timeout=_PATIENCE):
        raise RuntimeError(
            f"waited {_PATIENCE:.0f} s for another stage that draws random numbers alone. If a layer there waits for a "
            "pipeline that it runs in a thread of its own, start that thread with the layer's context "
            "(contextvars.copy_context().run), or draw nothing in it."
        )
    try:
        kept = torch.default_generator.get_state()
        token = _inner.set(_Gate())
        try:
            torch.default_generator.set_state(state)
            yield
        finally:
            torch.default_generator.set_state(kept)
            _inner.reset(token)
    finally:
        lock.release()


class Seeds:
    """The seeds of one pass, made from one number of the default generator, which it takes only if something drew.

    The seeds are numbers of another generator, seeded by that one. Taken from the default generator in a row, those
    of the next pass would be the same ones, shifted by one microbatch.
    """

    def __init__(self, stages: int, microbatches: int) -> None:
        self._before = torch.default_generator.get_state()
        generator = torch.Generator()
        generator.set_state(self._before)
        with unobserved():
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
            with unobserved():
                torch.randint(2**62, (), generator=torch.default_generator, device="cpu")
        return watched


@dataclass(frozen=True)
class Run:
    """A run's value, whether it drew, and in which manner the next run is to draw."""

    value: Any
    drew: bool
    manner: Manner


class Numbers:
    """The random numbers of one microbatch on one stage: drawn by a first run, and by others again.

    They are the same in every manner: a run that finds the manner out is no other than those after it.

    Args:
        seed: of the numbers.
        manner: of the stage, as known before the run.
        again: whether there will be other runs. Then a quiet stage is watched too, and so are generators of the
            layers' own, which a random function is given as an argument.
        blind: whether no mode is to be used. Compiled code draws unseen, and is compiled again under a mode.
    """

    def __init__(self, seed: int, manner: Manner, *, again: bool = False, blind: bool = False) -> None:
        self._seed = seed
        self._manner = manner
        self._again = again
        self._blind = blind
        self._generators: dict[torch.Generator, Tensor] = {}

    def draw(self, call: Callable[[], Any]) -> Run:
        """Runs the call."""
        manner = self._manner
        if manner is Manner.QUIET and (self._blind or not self._again):
            return Run(call(), False, manner)
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        start = generator.get_state()
        if manner in (Manner.QUIET, Manner.SEEN):
            swapping = _Swapping(self._generators, generator)
            value = swapping.watch(call)
            return Run(value, _differ(start, generator), Manner.SEEN if swapping.called else manner)
        with _own_state(start):
            if self._blind:
                value = call()
                return Run(value, _moved(start), Manner.UNSEEN if _moved(start) else Manner.QUIET)
            witness = _Witness(self._generators, start)
            value = witness.watch(call)
            drew = _moved(start)
            if not witness.saw_all() or manner is Manner.UNSEEN:
                return Run(value, drew, Manner.UNSEEN)
            # Dropout of probability 0 draws nothing yet. Without grad mode nothing is recomputed: what has not drawn
            # may run without a mode, for which attention would give up its fast path.
            seen = witness.called if torch.is_grad_enabled() else drew
            return Run(value, drew, Manner.SEEN if seen else Manner.QUIET)

    def redraw(self, call: Callable[[], Any]) -> None:
        """Runs the call with the numbers of the first run; afterwards every generator is as before."""
        now = {generator: generator.get_state() for generator in self._generators}
        try:
            for generator, state in self._generators.items():
                generator.set_state(state)
            again = Numbers(self._seed, self._manner, again=True, blind=self._blind)
            again.draw(call)
        finally:
            for generator, state in now.items():
                generator.set_state(state)


def _moved(state: Tensor) -> bool:
    """Whether the default generator has drawn since it had this state."""
    return _differ(state, torch.default_generator)


def _differ(state: Tensor, generator: torch.Generator) -> bool:
    with unobserved():
        return not torch.equal(state, generator.get_state())


class _Catching(TorchFunctionMode):
    """Sees the random functions that are called for CPU tensors, as they are called by the layers themselves."""

    def __init__(self, generators: dict[torch.Generator, Tensor]) -> None:
        super().__init__()
        self._generators = generators
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)
        self._grad = torch.is_grad_enabled()
        self.called = False

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
        if func not in _RANDOM:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            if generator not in self._generators:
                self._generators[generator] = generator.get_state()
            return func(*args, **kwargs)
        if not self._mine(args):
            return func(*args, **kwargs)
        self.called = True
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

    def __init__(self, generators: dict[torch.Generator, Tensor], generator: torch.Generator) -> None:
        super().__init__(generators)
        self._generator = generator

    def draw(self, call: Callable[[], Any]) -> Any:
        with _own_state(self._generator.get_state()):
            try:
                return call()
            finally:
                self._generator.set_state(torch.default_generator.get_state())


class _Witness(_Catching):
    """Finds out whether the default generator moves in random functions alone."""

    def __init__(self, generators: dict[torch.Generator, Tensor], start: Tensor) -> None:
        super().__init__(generators)
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
    *_functions(F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ "
                   "gumbel_softmax scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d "
                   "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"),
    *_functions(torch, "dropout dropout_ native_dropout feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
                       "feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ rand randn randint rand_like "
                       "randn_like randint_like randperm bernoulli multinomial normal poisson binomial "
                       "_standard_gamma _sample_dirichlet"),
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
