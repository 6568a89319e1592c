"""Random numbers of a stage's microbatch, from a separate seed, so that seeded runs and recomputations repeat them.

The CPU's default generator belongs to the whole process. Worker threads that drew from it would interleave
unpredictably, and a recomputation would see other dropout masks than its first forward. So each (stage, microbatch)
gets a seed. How a stage runs depends on whether it draws, which its first microbatch shows:

    UNKNOWN ── drew nothing ──> NONE         runs free; nothing watches what it does
       │  ^                      │
       │  └──── drew after all ──┘           seen from the generator's state before and after
       └────── drew ──────────> EXCLUSIVE    has the default generator alone, in a state made from its seed

An UNKNOWN stage runs like an EXCLUSIVE one, so that the first microbatch draws the same numbers as it would later.
After a call in which something unknown drew, all stages that aren't EXCLUSIVE are DOUBTED: they run like EXCLUSIVE ones
for a whole call, since one of them may draw in some microbatches only.

If the recomputation of a run that drew ends in another state, something else has drawn during the run, and it is an
error: its numbers aren't those of the recomputation.

If a stage in mode NONE moves the generator, it has drawn from the caller's state. Its recomputation starts from the
generator's state before that run, and must end in the state after it. If another stage owned the generator during the
run, these states are unknown, and a recomputation that draws is an error.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from splitpipe.core.generator import (
    Seeds,
    exclusive_generator,
    has_drawn,
    has_moved,
    lock_on_recompute,
    observe,
    set_state,
    state_lock,
    state_of,
    states_differ,
)
from splitpipe.core.note import uncompiled
from splitpipe.core.thread_state import outermost

T = TypeVar("T")

#: How many runs must all have drawn before a stage counts as drawing.
_TRIES = 3


class RngMode(Enum):
    """How a stage draws from the CPU's default generator, as its runs have shown."""

    UNKNOWN = "unknown"
    DOUBTED = "doubted"
    NONE = "none"
    EXCLUSIVE = "exclusive"


class RngFacts(Protocol):
    """The facts about a stage's use of random numbers."""

    rng: RngMode
    #: The generators that random functions were given. None: no run has been watched for them yet.
    generators: Collection[Generator] | None


class Numbers:
    """The random numbers of one microbatch on one stage, or on a block of it.

    They are drawn by a first run, and, if ``again``, by recomputations. A block whose stage has the default generator
    alone (``held``) draws from where its stage is, so that its numbers are those of a run without checkpointing.
    """

    def __init__(
        self,
        seed: int,
        facts: RngFacts,
        *,
        again: bool = False,
        owned: Collection[Generator] = (),
        compiled: bool = False,
        held: bool = False,
    ) -> None:
        self._seed = seed
        self._held = held
        self._facts = facts
        self._again = again
        new = facts.rng in (RngMode.UNKNOWN, RngMode.DOUBTED) or again and facts.generators is None
        # Under a function mode, compiled code would be compiled again.
        self._watch = None if compiled or not new else FirstRun()
        self._generators = {each: state_of(each) for each in (*owned, *(facts.generators or ()))} if again else {}
        self._exclusive = facts.rng is not RngMode.NONE
        #: True if a free run drew; None if that can't be known.
        self._drew: bool | None = False
        self._states: tuple[Tensor, Tensor] | None = None
        # The states at the start of the first run, and at its end if it drew, unless it was free.
        self._begun: Tensor | None = None
        self._ended: Tensor | None = None

    def draw(self, call: Callable[[], T]) -> tuple[T, bool]:
        """The value of the call, and whether it drew random numbers."""
        if self._watch is None:
            return self._draw(call)
        with outermost(self._watch):
            found = self._draw(call)
        self._generators.update(self._watch.generators)
        self._facts.generators = tuple(self._watch.generators)
        return found

    def _draw(self, call: Callable[[], T]) -> tuple[T, bool]:
        facts = self._facts
        if not self._exclusive:
            value = self._free(call) if self._again else call()
            return value, False
        self._begun = start = state_of() if self._held else self._start()
        with nullcontext() if self._held else exclusive_generator(start):
            value = call()
            end = state_of()
        drew = states_differ(start, end)
        if self._again and drew:
            self._ended = end
        if drew or self._watch is not None and self._watch.moved:
            facts.rng = RngMode.EXCLUSIVE
        elif facts.rng is not RngMode.EXCLUSIVE:
            if facts.rng is RngMode.UNKNOWN:
                facts.rng = RngMode.NONE
            self._exclusive = False
        return value, drew

    def _free(self, call: Callable[[], T]) -> T:
        before = observe()
        value = call()
        after = observe()
        self._drew = has_drawn(before, after)
        if self._drew and before is not None and after is not None:
            self._states = before[0], after[0]
            self._facts.rng = RngMode.UNKNOWN
        return value

    def _start(self) -> Tensor:
        return Generator().manual_seed(self._seed).get_state() if self._begun is None else self._begun

    def redraw(self, call: Callable[[], object]) -> None:
        """Runs the call with the numbers of the first run, twice if necessary; generators stay as they are now."""
        now = {generator: state_of(generator) for generator in self._generators}
        try:
            _set(self._generators)
            if self._exclusive:
                start = self._start()
                with exclusive_generator(start):
                    call()
                    end = state_of()
                # A lazy layer only draws in its first run, which doesn't matter if nothing else draws.
                if self._ended is not None and states_differ(start, end) and states_differ(self._ended, end):
                    raise DisturbedError(_DISTURBED)
            else:
                self._repeat(call)
        finally:
            _set(now)

    def _repeat(self, call: Callable[[], object]) -> None:
        """Repeats a free run."""
        if self._drew is False:
            before = observe()
            call()
            if not has_drawn(before, observe()):
                return
        start = self._start() if self._states is None else self._states[0]
        # If the generator moved, try again: torch.utils.checkpoint, in the backward thread of another device, may have
        # set the CPU's generator to an earlier state, without the lock.
        for _ in range(1 if self._states is not None else _TRIES):
            _set(self._generators)
            with exclusive_generator(start):
                call()
                end = state_of()
            if not states_differ(start, end):
                return  # Something else drew.
        self._facts.rng = RngMode.EXCLUSIVE
        if self._drew is None or self._states is not None and states_differ(end, self._states[1]):
            raise RuntimeError(_BEGUN.format("while others did, which its stage's first run didn't do"))


def _set(states: Mapping[Generator, Tensor]) -> None:
    for generator, state in states.items():
        set_state(state, generator)


_BEGUN = (
    "a layer has begun to draw random numbers {}: its recomputation may draw different ones. Repeat the step, which "
    "will take this into account. If a thread that you started draws, give it a separate torch.Generator."
)


#: Something drew during a run that had the generator to itself.
_DISTURBED = (
    "a recomputation drew other random numbers than its first run, or something else drew during that run: a thread "
    "that you started, or a layer that has begun to draw. Repeat the step, which will take new layers into account; "
    "give a thread a separate torch.Generator. A layer that draws in its first run must draw in a recomputation too."
)


class DisturbedError(RuntimeError):
    """Raised for numbers that a recomputation didn't draw again: any stage may have begun to draw."""


_UNREPEATED = (
    "{} begins inside torch.utils.checkpoint (the module's own gradient checkpointing), which only repeats the random "
    "numbers of the previous device, and draws there: expected checkpoint='always' instead, and the module's own "
    "checkpointing turned off (gradient_checkpointing_disable())."
)


def torch_checkpoint_rng(facts: RngFacts, seeds: Seeds, *, side_by_side: bool) -> AbstractContextManager[None]:
    """Around B: makes recomputations of ``torch.utils.checkpoint`` in it draw the same numbers as their forward."""

    def begin() -> None:
        if side_by_side and facts.rng is not RngMode.EXCLUSIVE and not seeds.untouched:
            facts.rng = RngMode.UNKNOWN
            raise RuntimeError(
                _BEGUN.format("inside torch.utils.checkpoint, which its stage's first run didn't do, while others draw")
            )

    return lock_on_recompute(begin)


class FirstRun(TorchFunctionMode):
    """Watches a run for draws that the states before and after it don't show."""

    def __init__(self) -> None:
        super().__init__()
        self._start: Tensor | None = None
        self.generators: dict[Generator, Tensor] = {}  # Generators given to functions, and their states before.
        self.moved = False  # Whether the default generator ever moved: a layer may restore it.

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # is_compiling() is true in every thread while any of them compiles.
        if not torch.compiler.is_dynamo_compiling():
            generator = kwargs.get("generator")
            if generator is not None and generator not in self.generators:
                self.generators[generator] = state_of(generator)
            if self._start is None:
                self._start = state_of()
            self._look()
        try:
            return func(*args, **kwargs)
        finally:
            if self._start is not None:
                self._look()  # What comes next may restore the state, as at the end of torch.random.fork_rng.

    def _look(self) -> None:
        if not self.moved and not torch.compiler.is_dynamo_compiling():
            self.moved = self._start is not None and has_moved(self._start)

    def begin(self) -> None:
        """Begins to watch another run."""
        self._start, self.moved = None, False


#: The seed and the offset of an accelerator's generator; or its state, if it consists of more.
_Position = tuple[int, int] | Tensor


class DeviceState:
    """The state of an accelerator's generator at some time, such as a microbatch's start; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = None if device.type == "cpu" else _position_of(device)

    @property
    def moved(self) -> bool:
        """True if something has drawn since the state was taken."""
        return self._state is not None and not _same(self._state, _position_of(self._device))

    def verify_undrawn(self, stage: object) -> None:
        """Raises if a stage that began inside a checkpoint has drawn since the state was taken."""
        if self.moved:
            raise RuntimeError(_UNREPEATED.format(stage))

    def restored(self) -> AbstractContextManager[object]:
        """Makes draws inside the block repeat those since the state was taken; after it, the generator is as before."""
        return nullcontext() if self._state is None else _Restored(self._device, self._state)


class _Restored:
    """Leaves a generator alone if it is where it should be, the usual case."""

    __slots__ = ("_device", "_now", "_then")

    def __init__(self, device: torch.device, then: _Position) -> None:
        self._device, self._then = device, then

    def __enter__(self) -> None:
        self._now = _position_of(self._device)
        if not _same(self._then, self._now):
            _put(self._device, self._then)

    def __exit__(self, *exc_info: object) -> None:
        if not _same(self._now, _position_of(self._device)):
            _put(self._device, self._now)


def _generator(device: torch.device) -> Generator | None:
    """The default generator of a device, if a seed and an offset are its whole state."""
    if device.type != "cuda" or device.index is None:
        return None
    if not torch.cuda.default_generators:
        torch.cuda.init()
    return torch.cuda.default_generators[device.index]


def _position_of(device: torch.device) -> _Position:
    generator = _generator(device)
    if generator is not None:  # No lock is needed, since no tensor is made.
        return generator.initial_seed(), generator.get_offset()
    with state_lock():
        state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _put(device: torch.device, position: _Position) -> None:
    generator = _generator(device)
    with state_lock():
        if generator is None:
            torch.get_device_module(device).set_rng_state(position, device)
        else:
            seed, offset = position
            generator.manual_seed(seed)
            generator.set_offset(offset)


def _same(one: _Position, other: _Position) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
