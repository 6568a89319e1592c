"""A snapshot of a stage's modules, as one microbatch found them, which is restored while it is recomputed.

Forward may write to buffers (BatchNorm counts, spectral norm iterates), and ``torch.func.functional_call`` swaps
parameters only for the time of the forward. A recomputation with the state that exists in backward would count twice,
or differentiate another function.

    a buffer                   a clone serves every microbatch that finds its buffer at the same version
    written without a version  (``buffer.data.add_(1)``) found by comparing values in a stage's first run: always cloned

A forward that assigns a buffer, or makes a block when it is first needed, isn't recomputed: a second run might not do
it again.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from splitpipe.core.tensors import is_plain
from splitpipe.core.torch_private import _foreach_clone, _foreach_copy_, _unsafe_preserve_version_counter
from splitpipe.stage.inventory import Buffers, Inventory, Parameters, Slot
from splitpipe.stage.saved import identify


class BufferCopies(NamedTuple):
    """Buffers as a microbatch found them, in lists of the same order."""

    buffers: Buffers
    versions: list[int]
    clones: list[Tensor]
    #: Slots of buffers whose version is known to change with every write of a forward.
    versioned: set[Slot]

    def written(self, versions: list[int]) -> list[bool]:
        """For each, by its current version: True if it has been written to since, or may have been."""
        versioned = self.versioned
        found = zip(self.buffers.slots, self.versions, versions)
        return [then != now or slot not in versioned for slot, then, now in found]


class Clones:
    """Clones of a stage's buffers, kept from call to call."""

    def __init__(self) -> None:
        self._copies = BufferCopies(Buffers([], [], [], [], True), [], [], set())

    def take(self, buffers: Buffers, fresh: bool = False) -> BufferCopies:
        """The current buffers, with clones; a clone is reused if its buffer hasn't changed."""
        if not buffers.slots and not fresh:
            if self._copies.buffers is not buffers:
                self._copies = BufferCopies(buffers, [], [], set())
            return self._copies
        versions, last, versioned = buffers.versions(), self._copies, self._copies.versioned
        if buffers.slots != last.buffers.slots or not all(map(is_, buffers.counters, last.buffers.counters)):
            known = {
                (id(x), id(counter))
                for slot, x, counter in zip(last.buffers.slots, last.buffers.tensors, last.buffers.counters)
                if slot in versioned
            }
            found = zip(buffers.slots, buffers.tensors, buffers.counters)
            versioned = {slot for slot, x, counter in found if (id(x), id(counter)) in known}
        elif (
            versions == last.versions and buffers is last.buffers and versioned.issuperset(buffers.slots) and not fresh
        ):
            return last
        then = {} if fresh else {
            (id(x), version): clone for x, version, clone in zip(last.buffers.tensors, last.versions, last.clones)
        }
        kept = [
            then.get((id(x), version)) if slot in versioned else None
            for slot, x, version in zip(buffers.slots, buffers.tensors, versions)
        ]
        new = iter(_clones([x for x, clone in zip(buffers.tensors, kept) if clone is None]))
        clones = [next(new) if clone is None else clone for clone in kept]
        self._copies = copies = BufferCopies(buffers, versions, clones, versioned)
        return copies

    def compare(self, copies: BufferCopies) -> None:
        """Learns from a stage's first run which buffers change without changing their version."""
        buffers = copies.buffers
        found = zip(buffers.slots, buffers.tensors, buffers.quiet, copies.versions, buffers.versions(), copies.clones)
        for slot, x, quiet, then, now, clone in found:
            if not quiet and (then != now or not is_plain(x) or torch.equal(x, clone)):
                copies.versioned.add(slot)


class Snapshot:
    """Parameters, buffers and train or eval modes at the start of one microbatch."""

    def __init__(self, inventory: Inventory, parameters: Parameters, clones: Clones, fresh: bool = False) -> None:
        self._inventory = inventory
        self._parameters = parameters
        self._clones = clones
        self._slots = inventory.slots()
        self._buffers = clones.take(inventory.buffers(self._slots), fresh)
        self._volatile: set[int] | None = None
        self._restoring = False
        #: True if the forward has assigned parameters, buffers or submodules, or given lazy ones their memory.
        self.moved = False
        self.passing: Callable[[], set[int]] = set  #: The memory of buffers that get other values after a run.

    def close(self) -> Inventory:
        """Ends the forward; returns the inventory of the stage's current state."""
        left = self._inventory.slots()
        self.moved = not left.same(self._slots) or not self._buffers.buffers.complete
        return self._inventory.renewed() if self.moved and left.modules != self._slots.modules else self._inventory

    def untouched(self) -> bool:
        """True if a run would find the same state as the forward, and writes to no buffer: nothing must be restored."""
        inventory, parameters, copies = self._inventory, self._parameters, self._buffers
        parameters.verify()
        return (
            inventory.slots().same(self._slots) and parameters.required
            and inventory.training() == inventory.modes and not any(copies.written(copies.buffers.versions()))
        )

    def compare(self) -> None:
        """Compares values after a stage's first run."""
        self._clones.compare(self._buffers)

    def volatile(self) -> set[int]:
        """Inside ``restored``: the memory of buffers that the run may write to, and that are restored after it."""
        if not self._restoring:
            return set()
        if self._volatile is None:  # Called for each tensor that is saved.
            buffers, modes = self._buffers.buffers, self._inventory.modes
            self._volatile = {
                identify(x) for slot, x, norm in zip(buffers.slots, buffers.tensors, buffers.norms)
                # In training mode, a norm's backward doesn't use its buffers, though the node saves them.
                if not (norm and modes[slot[0] // 3])
            }
        return self._volatile

    def _passing(self, flagged: list[bool], before: list[int]) -> set[int]:
        """Called at the end of a run: memory of buffers that then get other values without changing version."""
        buffers, modes = self._buffers.buffers, self._inventory.modes
        found = zip(buffers.slots, buffers.tensors, buffers.counters, flagged, before, buffers.versions())
        return {
            identify(x) for slot, x, counter, flag, then, now in found
            if (flag or then != now)
            # In training mode, BatchNorm's backward doesn't use its buffers, though the node saves them.
            and (counter is None or not modes[slot[0] // 3])
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the state inside the block."""
        # Usually, everything is as it was already, which is checked in lists, for all modules at once.
        inventory, parameters = self._inventory, self._parameters
        parameters.verify()
        now, flags, modes = inventory.slots(), parameters.flags(), inventory.training()
        buffers, clones = self._buffers.buffers, self._buffers.clones
        before = buffers.versions()
        flagged = self._buffers.written(before)
        written = [(x, clone) for x, clone, flag in zip(buffers.tensors, clones, flagged) if flag]
        resized = [(x, x.data, clone) for x, clone in written if x.shape != clone.shape]
        written = [(x, clone) for x, clone in written if x.shape == clone.shape]
        own = [x for x, _ in written]
        values = [*zip(own, _clones(own))]
        try:
            if modes != inventory.modes:
                inventory.train(inventory.modes)
            if not now.same(self._slots):
                self._slots.put()
            parameters.require()
            _write(written)
            for x, _, clone in resized:
                x.data = clone.clone()
            self.passing, self._restoring = partial(self._passing, flagged, before), True
            yield
        finally:
            self.passing, self._restoring = set, False
            # Buffers that only this run has written to: it was requested during the forward itself.
            found = zip(buffers.tensors, clones, flagged, before, buffers.versions())
            values += [(x, clone) for x, clone, flag, then, later in found if then != later and not flag]
            _write(values)
            for x, data, _ in resized:
                x.data = data
            parameters.require(flags)
            if not now.same(inventory.slots()):
                now.put()
            if modes != inventory.training():
                inventory.train(modes)


@torch.no_grad()
def _clones(tensors: list[Tensor]) -> list[Tensor]:
    # A deep model has hundreds of running statistics: two calls for each would take twice as long.
    together = _foreach_clone is not None and tensors and all(map(is_plain, tensors))
    return [*_foreach_clone(tensors)] if together else [x.clone() for x in tensors]


def _write(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Writes to buffers, all in few kernels."""
    # Through .data: a buffer that autograd saved elsewhere keeps its version, because it keeps its values.
    plain = [(tensor.data, value) for tensor, value in values if is_plain(tensor)]
    if plain:
        _foreach_copy_([x for x, _ in plain], [value for _, value in plain])
    for tensor, value in values:
        if tensor.layout is not torch.strided:  # Its .data has separate indices.
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)
        elif not is_plain(tensor):
            tensor.data.copy_(value)
