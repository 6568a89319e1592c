"""Random numbers of F, which R draws again.

A checkpointed F keeps where the generators are that it draws from: that of its device, and, if the model draws from it,
the CPU's default one. R starts there.

An accelerator's generator is used by one worker at a time. The CPU's belongs to the whole process. So the ops of a
model that draws from it run one after another in the caller's thread: see ``stage.call``.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Generator, default_generator

#: For recomputations that set the default generator, which threads of autograd's may run side by side.
_setting = RLock()


class RNGStates:
    """Where the generators are before an F, of a stage or a block, that R repeats; ``of_cpu``: also the CPU's."""

    __slots__ = ("_device", "_position", "_state")

    def __init__(self, device: torch.device, of_cpu: bool) -> None:
        self._device, self._position = device, position_of(device)
        self._state = default_generator.get_state() if of_cpu else None

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Around R: the numbers of F; afterwards, the generators are where they were."""
        with nullcontext() if self._state is None else _setting:
            now = RNGStates(self._device, self._state is not None)
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
