"""A snapshot of a stage's modules, as one microbatch found them, which is restored while it is recomputed.

Forward may write to buffers (BatchNorm counts, spectral norm iterates), and ``torch.func.functional_call`` swaps
parameters only for the time of the forward. A recomputation with the state that exists in backward would count twice,
or differentiate another function.

    a buffer                   a clone serves every microbatch that finds its buffer at the same version
    written without a version  (``buffer.data.add_(1)``) found by comparing values in a stage's first run: always cloned

A forward may also put something new into a slot: reassign a buffer, or create a block when it is first needed. It is
recomputed with the old content of the slot, and must change the slot again. If it doesn't (because of a flag, or a
cache that has grown), it is recomputed with the new content:

    with the old content, the slot changes again (``self.mean = 0.9 * self.mean + ...``): right
    it stays as it was (``if length > self.length: self.cos = ...``): recomputed with the new content
    with that, it changes again: recomputed with the old content; if no choice fits, it is an error
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.core.tensors import is_plain
from splitpipe.core.torch_private import _foreach_clone, _foreach_copy_, _unsafe_preserve_version_counter
from splitpipe.stage.inventory import ABSENT, Buffers, Inventory, Parameters, Slot
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
            return BufferCopies(buffers, [], [], set())
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
        self._inventory = self._after = inventory
        self._parameters = parameters
        self._clones = clones
        self._slots = inventory.slots()
        self._buffers = clones.take(inventory.buffers(self._slots), fresh)
        self._moved: dict[Slot, tuple[Any, Any]] = {}
        self._volatile: set[int] | None = None
        self.passing: Callable[[], set[int]] = set  #: The memory of buffers that get other values after a run.

    def close(self) -> Inventory:
        """Ends the forward; returns the inventory of the stage's current state."""
        left = self._inventory.slots()
        if not left.same(self._slots):
            self._moved = self._slots.moved(left)
            self._slots = left
            if any(isinstance(value, nn.Module) for pair in self._moved.values() for value in pair):
                self._after = self._inventory.renewed()
                self._slots = self._after.slots()
        return self._after

    @property
    def grown(self) -> bool:
        """True if the forward has made modules or parameters, for whose gradients no other run has a graph."""
        moved = self._moved
        return bool(moved) and any([isinstance(after, (nn.Module, nn.Parameter)) for _, after in moved.values()])

    def untouched(self) -> bool:
        """True if a run would find the same state as the forward, and writes to no buffer: nothing must be restored."""
        inventory, parameters, copies = self._inventory, self._parameters, self._buffers
        parameters.verify()
        return (
            not self._moved and self._after.slots().same(self._slots) and parameters.required
            and inventory.training() == inventory.modes and not any(copies.written(copies.buffers.versions()))
        )

    def compare(self) -> None:
        """Compares values after a stage's first run."""
        self._clones.compare(self._buffers)

    def replay(self, run: Callable[[], None], restart: Callable[[], None]) -> None:
        """Runs the stage in the state that its forward found, except for what the forward made permanently.

        ``restart`` is called before each further try: it resets the random numbers, which a snapshot doesn't have.
        """
        left: set[Slot] = set()
        tries = _TRIES if self._moved else 1
        while tries:
            tries, ran = tries - 1, False
            with self.restored(left) as made:
                versions = [x._version for x in made]
                with suppress(Exception) if tries else nullcontext():
                    run()
                    ran = True
                counted = versions != [x._version for x in made]
                wrong = self._wrong(left)
            if ran and not wrong:
                if counted:
                    raise RuntimeError(_COUNTED)
                return
            if not wrong:
                tries = 1  # Try again, to raise its error.
            left ^= wrong
            restart()
        raise RuntimeError(
            f"a checkpointed stage assigns {', '.join(sorted(name for _, name in wrong))} in only some of its runs: "
            "expected the same each time. Make what a layer needs in its __init__, or use checkpoint='never'."
        )

    def _wrong(self, left: set[Slot]) -> set[Slot]:
        """The slots in which a run hasn't done what the forward did, or has done it a second time."""
        tables = self._inventory.tables
        wrong = set()
        for slot, (found, after) in self._moved.items():
            now = tables[slot[0]].get(slot[1], ABSENT)
            same = now is after if slot in left else now is not found
            if not same:
                wrong.add(slot)
        return wrong

    def volatile(self) -> set[int]:
        """The memory of buffers that a run may write to, and that are restored after it."""
        found = [(self._buffers.buffers, self._inventory.modes)]
        if self._moved or not found[0][0].complete:
            found.append((self._after.buffers(self._after.slots()), self._after.training()))
        elif self._volatile is not None:  # Called for each tensor that is saved.
            return self._volatile
        self._volatile = {
            identify(x) for buffers, modes in found
            for slot, x, norm in zip(buffers.slots, buffers.tensors, buffers.norms)
            # In training mode, a norm's backward doesn't use its buffers, though the node saves them.
            if not (norm and modes[slot[0] // 3])
        }
        return self._volatile

    def _made(self) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers that the forward made, to be restored to their current state; and those that aren't a norm's."""
        if not self._moved and self._buffers.buffers.complete:
            return [], []
        known = {*map(id, self._buffers.buffers.tensors)}
        after = self._after.buffers(self._after.slots())
        made = [(x, norm) for x, norm in zip(after.tensors, after.norms) if id(x) not in known]
        return [x for x, _ in made], [x for x, norm in made if not norm]

    def _passing(self, flagged: list[bool], before: list[int], made: list[Tensor]) -> set[int]:
        """Called at the end of a run: memory of buffers that then get other values without changing version."""
        buffers, modes = self._buffers.buffers, self._inventory.modes
        found = zip(buffers.slots, buffers.tensors, buffers.counters, flagged, before, buffers.versions())
        return {identify(x) for x in made}.union(
            identify(x) for slot, x, counter, flag, then, now in found
            if (flag or then != now)
            # In training mode, BatchNorm's backward doesn't use its buffers, though the node saves them.
            and (counter is None or not modes[slot[0] // 3])
        )

    @contextmanager
    def restored(self, left: Collection[Slot] = ()) -> Iterator[list[Tensor]]:
        """Restores the state inside the block, except for the slots ``left``; yields buffers that the forward made."""
        # Usually, everything is as it was already, which is checked in lists, for all modules at once.
        inventory, parameters = self._inventory, self._parameters
        parameters.verify()
        now, flags, modes = self._after.slots(), parameters.flags(), inventory.training()
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
            for (k, name), (found, _) in self._moved.items():
                if (k, name) in left:
                    continue
                if found is ABSENT:
                    inventory.tables[k].pop(name, None)
                else:
                    inventory.tables[k][name] = found
            parameters.require()
            _write(written)
            for x, _, clone in resized:
                x.data = clone.clone()
            made, counting = self._made()
            values += zip(made, _clones(made))
            self.passing = partial(self._passing, flagged, before, made)
            yield counting
        finally:
            self.passing = set
            # Buffers that only this run has written to: it was requested during the forward itself.
            found = zip(buffers.tensors, clones, flagged, before, buffers.versions())
            values += [(x, clone) for x, clone, flag, then, now in found if then != now and not flag]
            _write(values)
            for x, data, _ in resized:
                x.data = data
            parameters.require(flags)
            if not now.same(self._after.slots()):
                now.put()
            if modes != inventory.training():
                inventory.train(modes)


#: Usually, two are enough. A run that raises leaves later slots unchecked.
_TRIES = 5

_COUNTED = (
    "a checkpointed stage wrote to a buffer that it created in the same forward, so this microbatch can't be "
    "recomputed: expected it to exist before. Create it in the layer's __init__, or call the model once without grad "
    "before training; the next step finds it."
)


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
