"""Random numbers of F, which R draws again; and the same ones for two steps from one seed.

An accelerator's generator is used by one worker at a time: a checkpointed F saves its position, and R starts there.

The CPU's default generator belongs to the whole process. So the ops of a model that draws from it run one after
another in the caller's thread. Whether it draws, its first call shows, which runs like that, too; if it begins to draw
later, the end of that call notices it. Each F draws from a seed of (stage, microbatch): the order doesn't matter.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import string_at
from functools import cache, cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Generator, Tensor, default_generator

from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.core.worker import ProcessLock

#: For recomputations that set the default generator, which threads of autograd's may run side by side.
_setting = ProcessLock()


def states_differ(state: Tensor, other: Tensor) -> bool:
    """True if two states of generators differ."""
    return _bytes(state) != _bytes(other)


def _bytes(state: Tensor) -> bytes:
    with DisableTorchFunction():  # And not with torch's ops, which dispatch modes would see, and which release the GIL.
        return string_at(state.data_ptr(), state.nbytes)


class Draws:
    """Whether one call draws from the CPU's default generator; ``known``: what calls of each kind have shown.

    ``watched``: it may, as earlier ones did, or it is the ``first``. Its ops run one by one, and each F is looked at.
    """

    def __init__(self, known: dict[Any, bool], kind: Any) -> None:
        self._known, self._kind = known, kind
        self.first = kind not in known
        self.watched, self.drew = known.get(kind, True), False
        self._before = default_generator.get_state()

    @cached_property
    def _seed(self) -> int:
        return int.from_bytes(blake2b(_bytes(self._before), digest_size=7).digest(), "big")

    def start(self, number: int) -> Tensor:
        """The state from which an F with this number draws."""
        return Generator().manual_seed(self._seed + number).get_state()

    def end(self, recomputes: bool) -> None:
        """Advances the default generator if F drew; raises if something did unwatched and the call ``recomputes``."""
        if self.drew:
            default_generator.manual_seed(self._seed - 1)  # From which no F has drawn.
        unwatched = not self.watched and states_differ(self._before, default_generator.get_state())
        # A layer may draw in some steps only: a model that has drawn is watched from then on.
        self._known[self._kind] = self._known.get(self._kind, False) or self.drew or unwatched
        if unwatched and recomputes:
            raise RuntimeError(
                "something drew random numbers from the default generator unwatched: a layer that hadn't drawn "
                "before, or another thread. Its recomputation would draw others. Repeat the step, which will take "
                "new layers into account; give a thread a separate torch.Generator."
            )


class RNGStates:
    """The random numbers of one F of a stage; or, without a ``number``, of a block in it."""

    __slots__ = ("_device", "_draws", "_number", "_position", "_state")

    def __init__(self, draws: Draws, device: torch.device, number: int | None = None) -> None:
        self._draws, self._device, self._number = draws, device, number
        self._position: tuple[int, ...] = ()
        self._state: Tensor | None = None

    def first(self, recomputed: bool) -> AbstractContextManager[None]:
        """Around F; ``recomputed``: whether R follows."""
        if recomputed:
            self._position = position_of(self._device)
        return self._watched() if self._draws.watched else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        # Without a lock: a layer may wait for a thread that calls another pipeline.
        before = self._state = default_generator.get_state()
        if self._number is not None:
            self._state = self._draws.start(self._number)
            default_generator.set_state(self._state)
        try:
            yield
            self._draws.drew |= states_differ(self._state, default_generator.get_state())
        finally:
            if self._number is not None:
                default_generator.set_state(before)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Around R: the numbers of F; the generators are where they were, afterwards."""
        state = self._state if self._draws.drew else None
        with nullcontext() if state is None else _setting.lock:
            position, before = position_of(self._device), None if state is None else default_generator.get_state()
            try:
                _set_position(self._device, self._position)
                if state is not None:
                    default_generator.set_state(state)
                yield
            finally:
                _set_position(self._device, position)
                if before is not None:
                    default_generator.set_state(before)


@cache
def _generator(device: torch.device) -> Generator:
    """The default generator of an accelerator: a seed and an offset are its whole state."""
    module: Any = torch.get_device_module(device)
    if not module.default_generators:
        module.init()
    generator: Generator = module.default_generators[device.index]
    return generator


def position_of(device: torch.device) -> tuple[int, ...]:
    """The position of a device's default generator; an empty one for the CPU."""
    if device.type == "cpu":
        return ()
    generator = _generator(device)
    return generator.initial_seed(), generator.get_offset()


def _set_position(device: torch.device, position: tuple[int, ...]) -> None:
    if position:
        generator, (seed, offset) = _generator(device), position
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
