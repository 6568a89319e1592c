"""What a stage's modules have, as one microbatch found it, put back while it is recomputed.

Forward may write to buffers (BatchNorm counts, spectral norm iterates), and ``torch.func.functional_call`` swaps
parameters for the time of the forward alone. A recomputation that took what is there in backward would count twice,
or differentiate another function.

A clone of a buffer serves every microbatch that finds the buffer at the same version. Some kernels (BatchNorm's)
write without moving the version; a stage's first run compares values, and such buffers are cloned each time.

A forward may also put something new into a slot: a buffer assigned anew, a block made when it is first needed. It is
recomputed from what it found there, and must do so again. If it does not (a flag that says it is done, a cache that
has grown), it is recomputed with what it left there:

    recomputed from what it found, the slot changes again (``self.mean = 0.9 * self.mean + ...``): right
    it stays as found (``if length > self.length: self.cos = ...``): recomputed from what the forward left
    from that it changes once more: recomputed from what it found; if no choice fits, it is an error
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from splitpipe.core.tensors import is_plain
from splitpipe.stage.inventory import ABSENT, Inventory, Parameters, Slot, Slots


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
            then = {id(x): silent for x, silent in zip(self._taken.tensors, self._taken.silent)}
            # Nobody has looked whether a buffer tells that the stage's first run did not find.
            later = self._slots is not None
            silent = [
                x is None or quiet or then.get(id(x), later) for quiet, x in zip(_spread(modules, slots), slots.values)
            ]
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
            if x is not None and clone is not None and not silent and x._version == version and is_plain(x):
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
        self._inventory = self._after = inventory
        self._parameters = parameters
        self._clones = clones
        self._buffers = clones.take(inventory.buffers(), inventory.silent, fresh)
        self._slots = inventory.slots()
        self._moved: dict[Slot, tuple[Any, Any]] = {}

    def close(self) -> Inventory:
        """Ends the forward; gives the inventory of what the stage has now."""
        left = self._inventory.slots()
        if not left.same(self._slots):
            self._moved = self._slots.moved(left)
            self._slots = left
            if any(isinstance(value, nn.Module) for pair in self._moved.values() for value in pair):
                self._after = self._inventory.renewed()
                self._slots = self._after.slots()
        return self._after

    def compare(self) -> None:
        """To be called after a stage's first run."""
        self._clones.compare(self._buffers)

    def replay(self, run: Callable[[], None]) -> None:
        """Runs the stage with all as its forward found it, but for what the forward made for good.

        Raises:
            RuntimeError: a parameter was written to since; what forward computed with is gone. Or the stage does
                something else each time, or counts in a buffer that the same forward made.
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
                tries = 1  # To raise what it raised.
            left ^= wrong
        raise RuntimeError(
            f"a checkpointed stage assigns {', '.join(sorted(name for _, name in wrong))} in some of its runs only: "
            "expected the same each time. Make what a layer needs in its __init__, or use checkpoint='never'."
        )

    def _wrong(self, left: set[Slot]) -> set[Slot]:
        """The slots in which a run has not done what the forward did, or has done it a second time."""
        held = self._inventory.held
        wrong = set()
        for slot, (found, after) in self._moved.items():
            now = held[slot[0]].get(slot[1], ABSENT)
            if now is not after if slot in left else now is found:
                wrong.add(slot)
        return wrong

    def _made(self) -> tuple[list[Tensor], list[Tensor]]:
        """Buffers that the forward made: there is nothing to put back but what is now. And which of them may count."""
        if not self._moved and all([x is not None for x in self._buffers.tensors]):
            return [], []
        known = set(map(id, self._buffers.tensors))
        slots = self._after.buffers()
        found = [
            (x, quiet)
            for x, quiet in zip(slots.values, _spread(self._after.silent, slots))
            if x is not None and id(x) not in known
        ]
        return [x for x, _ in found], [x for x, quiet in found if not quiet]

    @contextmanager
    def restored(self, left: Collection[Slot] = ()) -> Iterator[list[Tensor]]:
        """All is as it was inside the block, and as it is now after it. Gives buffers that the forward made.

        Mostly it is already, which is looked at in lists, for all modules at once.

        Args:
            left: slots that are as the forward left them.

        Raises:
            RuntimeError: a parameter was written to since; what forward computed with is gone.
        """
        inventory, parameters = self._inventory, self._parameters
        parameters.verify()
        now, flags, modes = self._after.slots(), parameters.flags(), inventory.training()
        written = self._buffers.written()
        resized = [(x, x.data, clone) for x, clone in written if x.shape != clone.shape]
        written = [(x, clone) for x, clone in written if x.shape == clone.shape]
        values = [(x, _clone(x)) for x, _ in written]
        try:
            if modes != inventory.modes:
                inventory.train(inventory.modes)
            if not now.same(self._slots):
                self._slots.put()
            for (k, name), (found, _) in self._moved.items():
                if (k, name) in left:
                    continue
                if found is ABSENT:
                    inventory.held[k].pop(name, None)
                else:
                    inventory.held[k][name] = found
            parameters.require()
            _write(written)
            for x, _, clone in resized:
                x.data = clone.clone()
            made, counting = self._made()
            values += [(x, _clone(x)) for x in made]
            yield counting
        finally:
            _write(values)
            for x, data, _ in resized:
                x.data = data
            parameters.require(flags)
            if not now.same(self._after.slots()):
                now.put()
            if modes != inventory.training():
                inventory.train(modes)


#: Mostly two are enough. A run that raises leaves slots behind it that nobody knows of yet.
_TRIES = 5

_COUNTED = (
    "a checkpointed stage wrote to a buffer that it made in the same forward, so that this microbatch can't be "
    "recomputed: expected it made before. Make it in the layer's __init__, or call the model once without grad before "
    "training; the next step finds it made."
)


def _spread(modules: Sequence[bool], slots: Slots) -> list[bool]:
    return [one for one, size in zip(modules, slots.sizes) for _ in range(size)]


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone()


def _write(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Writes to buffers, all in few kernels."""
    # Through .data: a buffer that autograd saved elsewhere keeps its version, as it keeps its values.
    plain = [(tensor.data, value) for tensor, value in values if is_plain(tensor)]
    if plain:
        torch._foreach_copy_(*map(list, zip(*plain)))  # type: ignore[arg-type]
    for tensor, value in values:
        if tensor.layout is not torch.strided:  # Its .data has indices of its own.
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)
        elif not is_plain(tensor):
            tensor.data.copy_(value)
