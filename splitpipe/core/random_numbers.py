"""Random numbers of F, which R draws again; and the same ones for two steps from one seed.

A checkpointed F keeps where the generators are that it draws from: that of its device, and, if the model draws from it,
the CPU's default one. R starts there.

An accelerator's generator is used by one worker at a time. The CPU's belongs to the whole process. So the ops of a
model that draws from it run one after another in the caller's thread. Whether it draws, its first call shows, which
runs like that, too; if it begins to draw later, the end of that call notices it.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import string_at
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Generator, default_generator

from splitpipe.core.torch_private import DisableTorchFunction

#: For recomputations that set the default generator, which threads of autograd's may run side by side.
_setting = RLock()


def _default_position() -> bytes:
    with DisableTorchFunction():  # And not with torch's ops, which dispatch modes would see, and which release the GIL.
        state = default_generator.get_state()
        return string_at(state.data_ptr(), state.nbytes)


class Draws:
    """Whether one call draws from the CPU's default generator; ``known``: what calls of each kind have shown.

    ``watched``: it may, as earlier ones did, or it is the ``first``. Its ops run one after another.
    """

    def __init__(self, known: dict[Any, bool], kind: Any) -> None:
        self._known, self._kind, self._before = known, kind, _default_position()
        self.first, self.watched = kind not in known, known.get(kind, True)

    @property
    def drew(self) -> bool:
        """Whether something has drawn since the call began."""
        return _default_position() != self._before

    def end(self, recomputes: bool) -> None:
        """Notes whether the call drew; raises if it did unwatched and ``recomputes``."""
        drew = self.drew
        # A layer may draw in some steps only: a model that has drawn is watched from then on.
        self._known[self._kind] = self._known.get(self._kind, False) or drew
        if drew and not self.watched and recomputes:
            raise RuntimeError(
                "something drew random numbers from the default generator unwatched: a layer that hadn't drawn "
                "before, or another thread. Its recomputation would draw others. Repeat the step, which will take "
                "new layers into account; give a thread a separate torch.Generator."
            )


class RNGStates:
    """Where the generators are before an F, of a stage or of a block in it, that R repeats."""

    __slots__ = ("_device", "_draws", "_position", "_state")

    def __init__(self, draws: Draws, device: torch.device) -> None:
        self._draws, self._device, self._position = draws, device, position_of(device)
        self._state = default_generator.get_state() if draws.watched else None

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Around R: the numbers of F; afterwards, the generators are where they were."""
        with nullcontext() if self._state is None else _setting:
            now = RNGStates(self._draws, self._device)
            try:
                self._restore()
                yield
            finally:
                now._restore()

    def _restore(self) -> None:
        if self._state is not None:
            default_generator.set_state(self._state)
        if self._position:
            generator, (seed, offset) = _generator(self._device), self._position
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)


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
