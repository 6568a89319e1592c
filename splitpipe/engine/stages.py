"""The stages of any module, and of one call of it."""
from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from splitpipe.compiled.layers import compiled_call
from splitpipe.core.stream import Place, Stream
from splitpipe.deferral.function import Caller
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import PendingStore
from splitpipe.deferral.report import Sightings
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.homes import Homes
from splitpipe.stage.call import Call
from splitpipe.stage.layers import Named, ReportedStage, StageCache, StageFacts
from splitpipe.training.sink import Sink


class CodeStageLayers:
    """The modules that one stage calls, as layers: for its gradients, its report and its worker."""

    def __init__(self, index: int, place: Place, layers: Sequence[Named]) -> None:
        self.index = index
        self.place = place
        self.layers = layers
        self.arriving: list[Any] = []
        self.name = f"stage {index} ({place})"
        self.parameters: list[list[Tensor]] = []
        self.names: dict[int, str] = {}
        self.identities: frozenset[int] = frozenset()
        #: Parameters that aren't leaves, as with torch.func.functional_call.
        self.computed: list[Tensor] = []

    def refresh(self, every: ModuleParameters) -> None:
        """Looks up the current parameters."""
        self.parameters = [list(layer.parameters()) for _, layer in self.layers]
        self.names, self.identities, self.computed = every


class ModuleParameters(NamedTuple):
    """The parameters of a module: their names and identities, and those that are computed."""

    names: dict[int, str]
    identities: frozenset[int]
    computed: list[Tensor]


class CodeLayers:
    """The current modules of all stages."""

    def __init__(self, module: nn.Module, blocks: Blocks, homes: Homes, places: Sequence[Place]) -> None:
        self.skips: dict[Any, Any] = {}
        self.stages = []
        for index, place in enumerate(places):
            layers: list[Named] = []
            for called in homes.called[index]:
                if called in blocks.blocks:
                    layers.append((blocks.blocks[called], called))
                elif called in blocks.opened and (homes.stage_of.get(called) == index or called in homes.written):
                    layers.append((blocks.opened[called], _without_children(called)))
            self.stages.append(CodeStageLayers(index, place, layers))
        self.compiled = any(
            compiled_call(part) is not None or type(part).__name__ == "OptimizedModule" for part in module.modules()
        )
        self.refresh(module)

    def refresh(self, module: nn.Module) -> None:
        """Looks up the current parameters."""
        named = dict(module.named_parameters())
        computed: list[Tensor] = [x for x in named.values() if not x.is_leaf and x.requires_grad]
        names = {id(x): name for name, x in named.items()}
        every = ModuleParameters(names, frozenset(names), computed)
        for stage in self.stages:
            stage.refresh(every)

    def with_loss(self, objective: nn.Module) -> CodeLayers:
        """The same, with the loss as the last stage's last layer."""
        made = copy(self)
        last = made.stages[-1]
        own = CodeStageLayers(last.index, last.place, [*last.layers, ("loss_fn", objective)])
        names = {id(x): name for name, x in objective.named_parameters("loss_fn")}
        own.refresh(ModuleParameters({**names, **last.names}, last.identities | frozenset(names), last.computed))
        made.stages = [*made.stages[:-1], own]
        return made


def _without_children(module: nn.Module) -> nn.Module:
    """A module's own parameters and buffers."""
    own = nn.Module()
    own._parameters, own._buffers = module._parameters, module._buffers
    return own


class RunningStage(Protocol):
    """A stage of any kind of module during one call."""

    own: Any
    index: int
    device: torch.device
    compute: Stream
    facts: StageFacts
    sightings: Sightings
    pending: PendingStore | None

    @property
    def compiled(self) -> bool:
        """True if a layer is compiled."""

    #: Takes gradients of blocks that have separate graphs; None: everything is in one graph.
    sink: Any

    def caller(self, i: int) -> Caller | None:
        """What the layers of a microbatch need to know about the stage; None if all is left to autograd."""

    def note(self, done: bool = True) -> Note | None:
        """Records how gradients of the stage's parameters are computed, for the report; None if that is known."""


class CodeStage(ReportedStage):
    """A stage of any module during one call; weight gradients wait in ``pending``, or are left to autograd."""

    def __init__(
        self,
        own: CodeStageLayers,
        cache: StageCache,
        call: Call,
        modes: tuple[bool, ...],
        pending: PendingStore | None = None,
        compiled: bool = False,
    ) -> None:
        self.own = own
        self.index = own.index
        self.device = own.place.device
        self.compute: Stream = call.computes[own.index]
        self.compiled = compiled
        self.pending = pending
        self.sightings = cache.sightings
        self.facts = cache.facts.setdefault((torch.is_grad_enabled(), *modes), StageFacts())
        self.look()
        self.sink: Sink | None = None
