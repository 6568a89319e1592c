"""The layers of a model by stage, facts that follow from the layers, and facts that their runs have shown.

The facts that follow from the layers are cached. Each call compares every module's class, children and parameters with
the cached ones, by identity. If one differs (for example, a parameter that ``torch.func.functional_call`` swaps for one
call), the facts are determined again.
"""
from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, Protocol

from torch import Generator, Tensor, nn

from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.compiled.theirs import guarded
from splitpipe.core.dtensor import sharded
from splitpipe.core.rng import RngMode
from splitpipe.core.stream import Place
from splitpipe.deferral.function import Caller
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import PendingStore
from splitpipe.deferral.report import Sightings
from splitpipe.skip.box import Key
from splitpipe.skip.pairs import crossing
from splitpipe.skip.skippable import Skippable
from splitpipe.stage.inventory import Inventory
from splitpipe.stage.snapshot import Clones

Named = tuple[str, nn.Module]


@dataclass(eq=False)
class StageFacts:
    """The facts that runs of a stage have shown, for one setting of its layers' train and eval modes."""

    rng: RngMode = RngMode.UNKNOWN
    generators: Collection[Generator] | None = None
    #: True if the stage writes to its input in place. None: no run yet.
    in_place: bool | None = None
    #: True if a run has assigned parameters, buffers or submodules.
    assigns: bool = False
    #: The first call with a checkpointed run, all of whose runs may begin to.
    first: weakref.ref[Any] | None = None
    #: True if a checkpointed run has been compared with the snapshot before it.
    compared: bool = False
    #: True if it can be recomputed separately, with its graph made in backward; None: no run has shown that yet.
    plain: bool | None = None
    #: True if several threads have made the nodes of its graph; None: no run has shown that yet.
    threads: bool | None = None
    #: True if its part of the graph couldn't be cut out.
    whole: bool = False
    #: True if a graph of it has led to leaves that aren't its parameters.
    foreign: bool = False
    #: How many nodes its last graph had that was searched for such leaves, or their kinds.
    own_nodes: Any = None
    #: The shapes of its graphs, by kind, and what follows from them: see ``training.capture``.
    shapes: dict[Any, Any] = field(default_factory=dict)
    #: The parameters, by identity, for which a run has recorded how their gradients are computed.
    noted: Collection[int] | None = None


def noting(facts: StageFacts, sightings: Sightings, names: dict[int, str]) -> Note | None:
    """Records how gradients of parameters are computed, for the report; None if that is known."""
    return None if facts.noted is not None and facts.noted == names.keys() else sightings.note(names)


class ReportedStage:
    """A stage during one call, with what the report needs to know about its parameters."""

    own: Any
    facts: StageFacts
    sightings: Sightings
    pending: PendingStore | None

    def __str__(self) -> str:
        return str(self.own.name)

    def look(self) -> None:
        """Checks, at the beginning of the call, whether that is known."""
        self._known = noting(self.facts, self.sightings, self.own.names) is None

    def caller(self, i: int) -> Caller | None:
        """What the layers of a microbatch need to know about the stage; None if all is left to autograd."""
        pending, names = self.pending, self.own.names
        if pending is None:
            return None
        return Caller(pending.gains(i), None if self._known else self.sightings.note_uncompiled(names))

    def note(self, done: bool = True) -> Note | None:
        """Records how gradients of the stage's parameters are computed, for the report; None if that is known.

        ``done``: whether it will be known after this.
        """
        found = noting(self.facts, self.sightings, self.own.names)
        if done and found is not None:
            self.facts.noted = {*self.own.names}
        return found


@dataclass(eq=False)
class StageCache:
    """What is kept of a stage from call to call. Copies of a model start without it."""

    facts: dict[tuple[bool, ...], StageFacts] = field(default_factory=dict)
    clones: Clones = field(default_factory=Clones)
    sightings: Sightings = field(default_factory=Sightings)


class StageLayers:
    """The layers of one stage, with their names, and what follows from them."""

    def __init__(
        self, index: int, place: Place, layers: Sequence[Named], skips: dict[Key, tuple[int, int]]
    ) -> None:
        self.index = index
        self.place = place
        self.layers = layers
        self.calls = [guarded(layer) for _, layer in layers]
        self.name = f"stage {index} ({place})"
        self.arriving = [key for key, (source, target) in skips.items() if source < target == index]
        #: The skips that go to later stages, and the stages.
        self.leaving = [(key, target) for key, (source, target) in skips.items() if index == source < target]
        self.parameters: list[list[Tensor]] = [list(layer.parameters()) for _, layer in layers]
        self.described = [f"layer {name!r} ({type(layer).__name__})" for name, layer in layers]
        self.names = {id(x): own for name, layer in layers for own, x in layer.named_parameters(name)}
        self._modules = list(dict.fromkeys(module for _, layer in layers for module in layer.modules()))
        #: True if a layer stashes or pops, even if only within the stage.
        self.skippable = any(isinstance(module, Skippable) for module in self._modules)
        self._inventories: dict[tuple[bool, ...], Inventory] = {}
        #: All parameters, each once.
        self.every = [*{id(x): x for own in self.parameters for x in own}.values()]
        self.identities = frozenset(map(id, self.every))
        #: Parameters that aren't leaves, as with torch.func.functional_call.
        self.computed = [x for x in self.every if not x.is_leaf and x.requires_grad]

    def inventory(self) -> Inventory:
        """The inventory for the current train and eval modes of the modules."""
        modes = tuple([module.training for module in self._modules])
        found = self._inventories.get(modes)
        if found is None:
            found = self._inventories[modes] = Inventory(self.layers)
        return found


class AllLayers(Protocol):
    """The layers of all stages, of any kind of module."""

    @property
    def stages(self) -> Sequence[Any]:
        """Those of each stage, with ``layers``, names and modules."""

    @property
    def skips(self) -> Any:
        """The stages that each skip between stages goes from and to."""


class ChainLayers:
    """The layers of all stages, divided at ``spans``, and the stages that each skip between stages goes from and to."""

    def __init__(self, layers: Sequence[Named], spans: Sequence[tuple[int, int]], places: Sequence[Place]) -> None:
        parts = [layers[start:end] for start, end in spans]
        self.skips = crossing(parts)
        self.stages = [StageLayers(j, place, part, self.skips) for j, (place, part) in enumerate(zip(places, parts))]
        self._layers = layers
        self._modules = list(dict.fromkeys(chain.from_iterable(layer.modules() for _, layer in layers)))
        self._skippable = [module for module in self._modules if isinstance(module, Skippable)]
        self._found = self._look()
        #: True if there is a BatchNorm with statistics of the whole batch.
        self.collects = any(isinstance(module, DeferredBatchNorm) for module in self._modules)
        #: True if a parameter or buffer is a DTensor.
        self.sharded = sharded(layer for _, layer in layers)

    def still(self, layers: Sequence[Named]) -> bool:
        """True if these are the same layers, with the same modules and parameters in them."""
        found = self._look()
        return layers == self._layers and len(found) == len(self._found) and all(map(is_, found, self._found))

    def _look(self) -> list[Any]:
        """Class, children, parameters and forward of every module, and the namespaces of its skips."""
        return [
            *map(type, self._modules),
            *chain.from_iterable([module._modules.values() for module in self._modules]),
            *chain.from_iterable([module._parameters.values() for module in self._modules]),
            *[module._compiled_call_impl for module in self._modules],
            *[vars(module).get("forward") for module in self._modules],
            *[namespace for module in self._skippable for namespace, _ in (*module.stashable(), *module.poppable())],
        ]
