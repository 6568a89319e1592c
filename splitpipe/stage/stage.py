"""A stage of an nn.Sequential, or a checkpointed block as a stage, during one call."""
from __future__ import annotations

from typing import Any

import torch

from splitpipe.deferral.pending import PendingStore
from splitpipe.stage.call import Call
from splitpipe.stage.inventory import Parameters
from splitpipe.stage.layers import ReportedStage, StageCache, StageFacts, StageLayers
from splitpipe.stage.saved import SavedDirectly


class Stage(ReportedStage):
    """A stage during one call; weight gradients wait in ``pending``, or are left to autograd."""

    def __init__(
        self, own: StageLayers, cache: StageCache, call: Call, pending: PendingStore | None = None
    ) -> None:
        self.own = own
        self.index = own.index
        self.device = own.place.device
        #: Takes gradients of microbatches that have separate graphs; None: everything is in one graph.
        self.sink: Any = None
        self.compute = call.computes[own.index]
        #: True if others get its outputs themselves, rather than copies on another device.
        self.shared = call.computes.count(self.compute) > 1
        self.inventory = own.inventory()
        if call.checkpointed:
            self.parameters = Parameters(self.inventory)
            self.generators = self.inventory.generators()
            self.saved_directly = SavedDirectly(self.parameters.tensors)
        self.pending = pending
        self.sightings = cache.sightings
        self.clones = cache.clones
        self.facts = cache.facts.setdefault((torch.is_grad_enabled(), *self.inventory.modes), StageFacts())
        self.look()

    @property
    def compiled(self) -> bool:
        """True if a layer is compiled."""
        return self.inventory.compiled
