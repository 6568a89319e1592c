"""A stage's parameters and buffers as one microbatch found them, put back while it is recomputed.

Forward may write to buffers (BatchNorm counts, spectral norm iterates), and ``torch.func.functional_call`` swaps
parameters for the time of the forward alone. A recomputation that took what is there in backward would count twice,
or differentiate another function.

A clone of a buffer serves every microbatch that finds the buffer at the same version. Some kernels (BatchNorm's)
write without moving the version; a stage's first run compares values, and such buffers are cloned each time.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from splitpipe.inventory import Inventory, Parameters, Slots


class Taken(NamedTuple):
    """Buffers as a microbatch found them, each list in the order of their slots. No object a buffer: see ``saved``."""

    tensors: list[Tensor | None]
    versions: list[int]
    clones: list[Tensor | None]
    #: Which are known to change without their version telling; it may become known later.
    silent: list[bool]

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that were written to since, and what they were."""
        return [
            (tensor, clone)
            for tensor, version, clone, silent in zip(*self)
            if tensor is not None and clone is not None and (silent or tensor._version != version)
        ]


@dataclass
class Clones:
    """Clones of a stage's buffers, kept from pass to pass."""

    _slots: Slots | None = None
    _taken: Taken = field(default_factory=lambda: Taken([], [], [], []))

    def take(self, slots: Slots, modules: Sequence[bool], fresh: bool = False) -> Taken:
        """The buffers as they are now, with a clone of each.

        Args:
            slots: with the buffers.
            modules: whether each module's buffers are known to be silent.
            fresh: whether clones are to be new ones.
        """
        if self._slots is None or not slots.alike(self._slots):
            nothing = [None] * len(slots.values)
            known = [quiet for quiet, size in zip(modules, slots.sizes) for _ in range(size)]
            # Nobody has looked whether a buffer tells that the stage's first run did not find.
            later = self._slots is not None
            silent = [later or quiet or x is None for quiet, x in zip(known, slots.values)]
            self._taken = Taken([*nothing], [0] * len(nothing), [*nothing], silent)
        self._slots = slots
        before = self._taken
        versions = [0 if x is None else x._version for x in slots.values]
        clones = [
            clone if x is then and version == at and not silent and not fresh else None if x is None else _clone(x)
            for x, version, then, at, clone, silent in zip(slots.values, versions, *before)
        ]
        self._taken = Taken(slots.values, versions, clones, before.silent)
        return self._taken

    def compare(self, taken: Taken) -> None:
        """Learns which buffers have changed without their version telling."""
        for k, (x, version, clone, silent) in enumerate(zip(*taken)):
            if x is not None and clone is not None and not silent and x._version == version and _strided(x):
                taken.silent[k] = not torch.equal(x, clone)


class Snapshot:
    """Parameters, buffers and train or eval modes at the start of one microbatch.

    Args:
        inventory: of the stage.
        parameters: as the pass found them.
        clones: of the stage's buffers.
        fresh: whether it is the stage's first run, or the first one in these modes: to be compared.
    """

    def __init__(self, inventory: Inventory, parameters: Parameters, clones: Clones, fresh: bool = False) -> None:
        self._inventory = inventory
        self._parameters = parameters
        self._clones = clones
        self._buffers = clones.take(inventory.buffers(), inventory.silent, fresh)
        self._slots = inventory.slots()

    def compare(self) -> None:
        """To be called after a stage's first run."""
        self._clones.compare(self._buffers)

    def _made_since(self) -> list[Tensor]:
        """Buffers of lazy modules, which were made by the forward: there is nothing to put back but what is now."""
        before = self._buffers.tensors
        if all([x is not None for x in before]):
            return []
        now = self._inventory.buffers().values
        return [x for x, then in zip(now, before) if then is None and x is not None] if len(now) == len(before) else []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All is as it was inside the block, and as it is now after it.

        Mostly it is already, which is looked at in lists, for all modules at once.

        Raises:
            RuntimeError: a parameter was written to since; what forward computed with is gone.
        """
        inventory, parameters = self._inventory, self._parameters
        parameters.verify()
        now, flags, modes = inventory.slots(), parameters.flags(), inventory.training()
        written = self._buffers.written()
        values = [(tensor, _clone(tensor)) for tensor in (*(x for x, _ in written), *self._made_since())]
        try:
            if modes != inventory.modes:
                inventory.train(inventory.modes)
            if not now.same(self._slots):
                inventory.put(self._slots)
            parameters.require()
            _write(written)
            yield
        finally:
            _write(values)
            parameters.require(flags)
            if not now.same(inventory.slots()):
                inventory.put(now)
            if modes != inventory.training():
                inventory.train(modes)


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone()


def _write(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Writes to buffers, all in few kernels."""
    # Through .data: a buffer that autograd saved elsewhere keeps its version, as it keeps its values.
    plain = [(tensor.data, value) for tensor, value in values if _strided(tensor)]
    if plain:
        torch._foreach_copy_(*map(list, zip(*plain)))  # type: ignore[arg-type]
    for tensor, value in values:
        if tensor.layout is not torch.strided:  # Its .data has indices of its own.
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)
        elif not _strided(tensor):
            tensor.data.copy_(value)


def _strided(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Buffer) and x.layout is torch.strided and not x.is_nested
