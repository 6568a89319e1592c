"""A stage during one call, and a block as a stage: what is run, and recomputed, as one."""
from __future__ import annotations

from typing import Any

import torch

from splitpipe.core.stream import Stream
from splitpipe.deferral.function import Caller
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import PendingStore
from splitpipe.stage.call import Call
from splitpipe.stage.inventory import Parameters
from splitpipe.stage.layers import BlockLayers, StageCache, StageFacts, StageLayers
from splitpipe.stage.saved import SavedDirectly


class Stage:
    """A stage during one call; weight gradients wait in ``pending``, or are left to autograd.

    Args:
        own: its layers.
        cache: what is kept of it from call to call.
        call: the call of the model.
        modes: the train or eval modes of modules: for other ones, other facts hold.
        pending: the store of its pending weight gradients.
        compiled: whether a layer is compiled.
    """

    def __init__(
        self, own: StageLayers, cache: StageCache, call: Call, modes: tuple[bool, ...],
        pending: PendingStore | None = None, compiled: bool = False,
    ) -> None:
        self.own: Any = own
        self.index = own.index
        self.device = own.place.device
        self.compute: Stream = call.computes[own.index]
        self.compiled = compiled
        self.pending = pending
        self.sightings = cache.sightings
        self.facts = cache.facts.setdefault((torch.is_grad_enabled(), *modes), StageFacts())
        #: Takes gradients of microbatches or blocks that have separate graphs; None: everything is in one graph.
        self.sink: Any = None
        known = self.facts.noted is not None and self.facts.noted == own.names.keys()
        self._uncompiled = None if known or pending is None else self.sightings.note_uncompiled(own.names)

    def __str__(self) -> str:
        return str(self.own.name)

    def caller(self, i: int) -> Caller | None:
        """What the layers of a microbatch need to know about the stage; None if all is left to autograd."""
        return None if self.pending is None else Caller(self.pending.gains(i), self._uncompiled)

    def note(self, done: bool = True) -> Note | None:
        """Records how gradients of the stage's parameters are computed, for the report; None if that is known.

        ``done``: whether it will be known after this.
        """
        facts, names = self.facts, self.own.names
        if facts.noted is not None and facts.noted == names.keys():
            return None
        if done:
            facts.noted = {*names}
        return self.sightings.note(names)


class Block(Stage):
    """Layers that are run, and recomputed, as one: a stage of an nn.Sequential, or a checkpointed block."""

    def __init__(
        self, own: BlockLayers, cache: StageCache, call: Call, pending: PendingStore | None = None
    ) -> None:
        self.inventory = own.inventory()
        super().__init__(own, cache, call, self.inventory.modes, pending, self.inventory.compiled)
        #: True if others get its outputs themselves, rather than copies on another device.
        self.shared = call.computes.count(self.compute) > 1
        self.clones = cache.clones
        if call.checkpointed:
            self.parameters = Parameters(self.inventory)
            self.generators = self.inventory.generators()
            self.saved_directly = SavedDirectly(self.parameters.tensors)
