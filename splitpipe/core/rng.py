"""Random numbers of a stage's microbatch, from a seed of its own: a seeded run repeats, and so does a recomputation.

The CPU's default generator belongs to the whole process. Worker threads that drew from it would interleave by luck,
and a recomputation would see other dropout masks than its first forward. So each (stage, microbatch) gets a seed,
and draws from it in the cheapest manner that is right for its stage, which its first runs find out:

    UNKNOWN ── called no random function ──> QUIET    runs free
       │
       ├─ what it drew was seen ───────────> SEEN     runs free; each random call swaps the generator's state
       │
       └─ some was not ────────────────────> UNSEEN   runs alone, with the generator's state its own

What sees them is in ``catching``, how the generator's state is swapped in ``turn``.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from splitpipe.core.catching import Swapping, Witness, moved
from splitpipe.core.generator import own_state, recomputations
from splitpipe.core.thread_state import unobserved

_NOTHING = nullcontext()


class Manner(Enum):
    """How a stage draws, as far as its runs have shown."""

    UNKNOWN = "unknown"
    QUIET = "quiet"
    SEEN = "seen"
    UNSEEN = "unseen"


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

    @property
    def watched(self) -> bool:
        """Whether nothing has drawn from the default generator itself. Asked by who has the turn."""
        return not moved(self._before)

    def settle(self) -> bool:
        """Moves the default generator on if something drew; False if something drew that nobody watched."""
        watched = self.watched
        if self.drew:
            with unobserved():
                torch.randint(2**62, (), generator=torch.default_generator, device="cpu")
        return watched


class Run(NamedTuple):
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
        if manner in (Manner.QUIET, Manner.SEEN):
            swapping = Swapping(self._generators, self._seed)
            value = swapping.watch(call)
            return Run(value, swapping.drew, Manner.SEEN if swapping.called else manner)
        start = torch.Generator().manual_seed(self._seed).get_state()
        with own_state(start):
            if self._blind:
                value = call()
                return Run(value, moved(start), Manner.UNSEEN if moved(start) else Manner.QUIET)
            witness = Witness(self._generators, start)
            value = witness.watch(call)
            drew = moved(start)
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


class Known(Protocol):
    """What is known of a stage."""

    manner: Manner


def going_back(known: Known, seeds: Seeds, *, side_by_side: bool) -> AbstractContextManager[None]:
    """Around B: what ``torch.utils.checkpoint`` recomputes in it draws the numbers that its forward has drawn.

    Args:
        known: of the stage.
        seeds: of the pass.
        side_by_side: whether other stages work meanwhile.

    Raises:
        RuntimeError: the forward may have drawn while others did, since the stage had not drawn before.
    """

    def begin() -> None:
        if side_by_side and known.manner is not Manner.UNSEEN and not seeds.watched:
            known.manner = Manner.UNKNOWN
            raise RuntimeError(
                "a layer has begun to draw random numbers inside torch.utils.checkpoint, or where else it can't be "
                "seen, which its stage's first run did not: those of its recomputation may be others. Repeat the step, "
                "in which this is known. If a thread of your own draws, give it a torch.Generator of its own."
            )

    return recomputations(begin)


class DeviceState:
    """The state of an accelerator's generator at the start of a microbatch; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._state = None if self._module is None else self._module.get_rng_state(device)

    def restored(self) -> AbstractContextManager[None]:
        """Draws inside the block repeat those since the state was taken; after it the generator is as before."""
        return _NOTHING if self._module is None else self._restored()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        module: Any = self._module
        kept = module.get_rng_state(self._device)
        module.set_rng_state(self._state, self._device)
        try:
            yield
        finally:
            module.set_rng_state(kept, self._device)
