"""The layers of a model by stage, facts that follow from the layers, and facts that their runs have shown.

The facts that follow from the layers are cached. Each call compares every module's class, children and parameters with
the cached ones, by identity. If one differs (for example, a parameter that ``torch.func.functional_call`` swaps for one
call), the facts are determined again.
"""
from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Generator, Tensor, nn

from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.compiled.layers import is_compiled
from splitpipe.compiled.theirs import guarded
from splitpipe.core.dtensor import sharded
from splitpipe.core.rng import RngMode
from splitpipe.core.stream import Place
from splitpipe.deferral.report import Sightings
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.homes import Homes
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


@dataclass(eq=False)
class StageCache:
    """What is kept of a stage from call to call. Copies of a model start without it."""

    facts: dict[tuple[bool, ...], StageFacts] = field(default_factory=dict)
    clones: Clones = field(default_factory=Clones)
    sightings: Sightings = field(default_factory=Sightings)


class Known(NamedTuple):
    """The parameters that a stage may use."""

    names: dict[int, str]  #: By identity.
    identities: frozenset[int]
    #: Those that aren't leaves, as with torch.func.functional_call.
    computed: list[Tensor]

    @staticmethod
    def of(parameters: Iterable[tuple[str, Tensor]]) -> Known:
        """These parameters, with their names."""
        found = {id(x): (name, x) for name, x in reversed([*parameters])}
        computed = [x for _, x in found.values() if not x.is_leaf and x.requires_grad]
        return Known({key: name for key, (name, _) in found.items()}, frozenset(found), computed)


class StageLayers:
    """The layers of one stage, with their names: for its gradients, its report and its worker.

    ``known``: the parameters that it may use; None: those of the layers.
    """

    def __init__(self, index: int, place: Place, layers: Sequence[Named], known: Known | None = None) -> None:
        self.index = index
        self.place = place
        self.layers = layers
        self.name = f"stage {index} ({place})"
        self.parameters: list[list[Tensor]] = [list(layer.parameters()) for _, layer in layers]
        if known is None:
            known = Known.of(each for name, layer in layers for each in layer.named_parameters(name))
        self.names, self.identities, self.computed = known


class BlockLayers(StageLayers):
    """Layers that run one after another, and are recomputed together: a stage of an nn.Sequential, or a block.

    ``skips``: the stages that each skip between stages goes from and to.
    """

    def __init__(
        self, index: int, place: Place, layers: Sequence[Named], skips: Mapping[Key, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(index, place, layers)
        ways = {} if skips is None else skips
        self.arriving = [key for key, (source, target) in ways.items() if source < target == index]
        #: The skips that go to later stages, and the stages.
        self.leaving = [(key, target) for key, (source, target) in ways.items() if index == source < target]
        self.calls = [guarded(layer) for _, layer in layers]
        self.described = [f"layer {name!r} ({type(layer).__name__})" for name, layer in layers]
        self._modules = list(dict.fromkeys(module for _, layer in layers for module in layer.modules()))
        #: True if a layer stashes or pops, even if only within the stage.
        self.skippable = any(isinstance(module, Skippable) for module in self._modules)
        self._inventories: dict[tuple[bool, ...], Inventory] = {}
        #: All parameters, each once.
        self.every = [*{id(x): x for own in self.parameters for x in own}.values()]

    def inventory(self) -> Inventory:
        """The inventory for the current train and eval modes of the modules."""
        modes = tuple([module.training for module in self._modules])
        found = self._inventories.get(modes)
        if found is None:
            found = self._inventories[modes] = Inventory(self.layers)
        return found


class Structure:
    """Modules, and what their facts follow from: classes, children, parameters, forwards, namespaces of skips.

    ``above``: the module that contains all of them, of which only children and parameters count, since its forward may
    refer to this.
    """

    def __init__(self, roots: Iterable[nn.Module], above: nn.Module | None = None) -> None:
        self.modules = list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))
        self._tables: list[dict[str, Any]] = [] if above is None else [above._modules, above._parameters]
        self._buffers = [module._buffers for module in (*self.modules, *([] if above is None else [above]))]
        self._skippable = [module for module in self.modules if isinstance(module, Skippable)]
        self._found = self._look()

    def same(self) -> bool:
        """True if all of it is still the same objects."""
        found = self._look()
        return len(found) == len(self._found) and all(map(is_, found, self._found))

    def code(self) -> list[Any]:
        """The modules, their classes and their forwards, but not their parameters."""
        return [*self.modules, *self._found[: 3 * len(self.modules)]]

    def buffers(self) -> list[Tensor]:
        """All buffers, as they are now."""
        return [x for table in self._buffers for x in table.values() if x is not None]

    def modes(self) -> tuple[bool, ...]:
        """The modules' current train or eval modes."""
        return tuple([module.training for module in self.modules])

    def _look(self) -> list[Any]:
        modules = self.modules
        return [
            *map(type, modules),
            *[module._compiled_call_impl for module in modules],
            *[vars(module).get("forward") for module in modules],
            *chain.from_iterable([table.values() for table in self._tables]),
            *chain.from_iterable([module._modules.values() for module in modules]),
            *chain.from_iterable([module._parameters.values() for module in modules]),
            *[namespace for module in self._skippable for namespace, _ in (*module.stashable(), *module.poppable())],
        ]


class ModelLayers:
    """The layers of all stages of a model, which has this structure, and facts that follow from them."""

    def __init__(
        self, stages: Sequence[StageLayers], structure: Structure, objective: Structure | None = None
    ) -> None:
        self.stages = stages
        self.structure = structure
        self._objective = objective
        modules = structure.modules if objective is None else [*structure.modules, *objective.modules]
        #: The layers of blocks that are recomputed separately, by block and stage.
        self.blocks: dict[tuple[nn.Module, int], BlockLayers] = {}
        #: True if there is a BatchNorm with statistics of the whole batch.
        self.collects = any(isinstance(module, DeferredBatchNorm) for module in modules)
        #: True if a parameter or buffer is a DTensor.
        self.sharded = sharded(layer for stage in stages for _, layer in stage.layers)
        #: True if a module is compiled.
        self.compiled = any(map(is_compiled, modules))
        #: False if parameters are computed: these belong to one call, and keep their graph alive.
        self.lasting = not any([stage.computed for stage in stages])
        self._with_loss: tuple[nn.Module, Structure, ModelLayers] | None = None

    def same(self) -> bool:
        """True if the modules, and those of the loss, are still the same."""
        return self.structure.same() and (self._objective is None or self._objective.same())

    def parts(self) -> list[list[nn.Module]]:
        """The layers of each stage, without their names."""
        return [[layer for _, layer in stage.layers] for stage in self.stages]

    def with_loss(self, objective: nn.Module) -> ModelLayers:
        """The same, with the loss as the last stage's last layer."""
        known = self._with_loss
        if known is not None and known[0] is objective and known[1].same():
            return known[2]
        self._with_loss = None  # The copy would keep the one before, and that its own.
        made, structure = copy(self), Structure([objective])
        last = made.stages[-1]
        own = Known.of(objective.named_parameters("loss_fn"))
        both = Known({**own.names, **last.names}, last.identities | own.identities, last.computed)
        loss = StageLayers(last.index, last.place, [*last.layers, ("loss_fn", objective)], both)
        made.stages = [*made.stages[:-1], loss]
        self._with_loss = objective, structure, made
        return made


def chain_layers(
    layers: Sequence[Named], spans: Sequence[tuple[int, int]], places: Sequence[Place],
    objective: nn.Module | None = None,
) -> ModelLayers:
    """The layers of an nn.Sequential, divided at ``spans``; the loss, if there is one, is the last stage's last."""
    parts = [list(layers[start:end]) for start, end in spans]
    if objective is not None:
        parts[-1].append(("loss_fn", objective))
    skips = crossing(parts)
    stages = [BlockLayers(j, place, part, skips) for j, (place, part) in enumerate(zip(places, parts))]
    structure = Structure(layer for _, layer in layers)
    return ModelLayers(stages, structure, None if objective is None else Structure([objective]))


def code_layers(blocks: Blocks, homes: Homes, places: Sequence[Place]) -> ModelLayers:
    """The modules that each stage of any module has called so far, as its layers."""
    known = Known.of(blocks.module.named_parameters())  # Code between blocks may use any.
    stages = []
    for index, place in enumerate(places):
        layers: list[Named] = []
        for called in homes.called[index]:
            if called in blocks.blocks:
                layers.append((blocks.blocks[called], called))
            elif called in blocks.opened and (homes.stage_of.get(called) == index or called in homes.written):
                layers.append((blocks.opened[called], _without_children(called)))
        stages.append(StageLayers(index, place, layers, known))
    made = ModelLayers(stages, Structure(blocks.module.children(), blocks.module))
    made.compiled = made.compiled or is_compiled(blocks.module)
    return made


def _without_children(module: nn.Module) -> nn.Module:
    """A module's own parameters and buffers."""
    own = nn.Module()
    own._parameters, own._buffers = module._parameters, module._buffers
    return own
