"""The stages of any module during one call, and what the microbatches of a call share."""
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from splitpipe.batch.splitting import Split
from splitpipe.checks import Checkpoint
from splitpipe.compiled.options import CompileOptions
from splitpipe.core.stream import Place, Stream
from splitpipe.core.tensors import version_of
from splitpipe.deferral.function import Caller
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import PendingStore
from splitpipe.deferral.report import DeferralReport, Row, Sightings, row
from splitpipe.loss.tracing import Tracing
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.call_hook import compiled_call
from splitpipe.partition.homes import Homes
from splitpipe.schedule.op import Schedule
from splitpipe.stage.call import Call
from splitpipe.stage.layers import Named, ReportedStage, StageCache, StageFacts
from splitpipe.training.sink import Keyed, Sink


class Options(NamedTuple):
    """How a module is run."""

    cuts: tuple[str, ...]
    places: tuple[Place, ...]
    chunks: int
    checkpoint: Checkpoint
    uncheckpointed: int | None
    split: bool
    stash_limit: int | None
    schedule: Schedule | None
    batched: Any
    reduction: Any
    loss_fn: Callable[..., Any] | None
    grad_scaler: Any
    compiling: CompileOptions | None
    splitting: Split | None


class SegmentLayers:
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


class ModuleLayers:
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
            self.stages.append(SegmentLayers(index, place, layers))
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

    def with_loss(self, objective: nn.Module) -> ModuleLayers:
        """The same, with the loss as the last stage's last layer."""
        made = copy(self)
        last = made.stages[-1]
        own = SegmentLayers(last.index, last.place, [*last.layers, ("loss_fn", objective)])
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


class SegmentStage(ReportedStage):
    """A stage of any module during one call; weight gradients wait in ``pending``, or are left to autograd."""

    def __init__(
        self,
        own: SegmentLayers,
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


class BlockCalls(Protocol):
    """How checkpointed blocks are called."""

    def checkpointed(
        self, forward: Any, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        follow: bool,
    ) -> Any:
        """The value of a call, and what it has changed in lists and dicts among its arguments."""

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""


class Run:
    """One call: what its microbatches share."""

    def __init__(
        self, call: Call, stages: Sequence[RunningStage], *, ranked: bool, in_turn: bool = False
    ) -> None:
        self.call = call
        self.stages = stages
        #: True if autograd chooses what runs backward next, because there is no schedule.
        self.ranked = ranked
        #: True if ops run one after another.
        self.in_turn = in_turn

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""
        return []

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter or buffer of which a stage has a copy, with the copy."""
        return []

    def verify_copies(self) -> None:
        """Raises for copies that were written to, and forgets all copies."""


class CodeRun(Run):
    """One call of any module, by the code of its forward."""

    def __init__(
        self, call: Call, stages: Sequence[RunningStage], forward: Callable[..., Any], blocks: Blocks, homes: Homes, *,
        ranked: bool, one_graph: bool, calls: BlockCalls, tracing: Tracing | None, look: Callable[[int], None],
    ) -> None:
        super().__init__(call, stages, ranked=ranked, in_turn=homes.in_turn)
        self.calls = calls
        self.tracing = tracing
        self.forward = forward
        #: Called with the number of a microbatch between two of its stages.
        self.look = look
        self.blocks = blocks
        self.homes = homes
        #: True if values need not be found between blocks, because there is one device, and one graph over all stages.
        self.one_graph = one_graph
        self._local: dict[tuple[nn.Module, int], bool] = {}
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor, int | None]] = {}
        self._buffers: dict[int, tuple[str, Tensor]] | None = None

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""
        return self.calls.parameters(stage)

    def settled(self, module: nn.Module, stage: int) -> bool:
        """Gives a module that a stage calls its home; returns True if its tensors are on the stage's device."""
        key = module, stage
        local = self._local.get(key)
        if local is None:
            with self._lock:
                parts = module.modules() if module in self.blocks.blocks else [module]
                local = self._local[key] = self.homes.settle(module, parts, stage)
        return local

    def adopted(self, x: Tensor, stage: int) -> bool:
        """Gives a home to a tensor that had none, as its module is never called; returns True if it did."""
        with self._lock:
            return self.homes.adopt(x, stage)

    def verify_cut(self, block: nn.Module, cut: int, stage: int) -> None:
        """Raises for a cut whose first call comes after a later stage has begun."""
        if cut < stage and block not in self.homes.stage_of:
            names = {number: self.blocks.described(part) for part, number in self.blocks.cuts.items()}
            raise ValueError(
                f"{names[stage]}, where stage {stage} starts, was called before {names[cut]}, where stage {cut} "
                "starts: expected cuts= in the order in which the forward calls them."
            )

    def is_buffer(self, x: Tensor) -> bool:
        """True for a buffer of the module."""
        if self._buffers is None:
            self._buffers = {id(buffer): (name, buffer) for name, buffer in self.blocks.module.named_buffers()}
        return id(x) in self._buffers

    def copied(self, x: Tensor, stage: int, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """A parameter or buffer on another device: one copy per call and device."""
        key = id(x), self.stages[stage].device
        found = self._copies.get(key)
        if found is None:
            with self._lock:
                found = self._copies.get(key)
                if found is None:
                    made = copy(x)
                    found = self._copies[key] = x, made, version_of(made)
        return found[1]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter or buffer with its copy."""
        return [(x, made) for x, made, _ in self._copies.values()]

    def verify_copies(self) -> None:
        """Raises for copies of parameters and buffers that were written to: the originals haven't changed.

        Forgets all copies, since the run itself is part of cycles, and copies of tied embeddings are large.
        """
        copies, self._copies = self._copies, {}
        for x, made, version in copies.values():
            if version_of(made) != version:
                names = {id(own): name for name, own in self.blocks.module.named_parameters()}
                names |= {key: name for key, (name, _) in (self._buffers or {}).items()}
                raise RuntimeError(
                    f"{names.get(id(x), 'a parameter')!r}, which is on {x.device}, was written to by a stage on "
                    f"{made.device}, which has a copy during a call: expected the modules that write to it in one "
                    "stage, or in stages on one device. Choose other cuts=, or devices."
                )


def report(
    module: nn.Module, stage_of: Mapping[nn.Module, int], caches: Sequence[StageCache], split: bool
) -> DeferralReport:
    """The report on deferral, from the uses of parameters seen in the stages' forwards."""
    rows: list[Row] = []
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        stage = stage_of.get(part, 0)
        cache = caches[stage]
        unseen = "no function was seen to use it in a forward with grad mode (compiled code isn't seen)"
        if not split:
            unseen = "backward='autograd'"
        elif any(facts.whole for facts in cache.facts.values()):
            unseen = "the graph of its stage can't be cut out of the surrounding graph"
        elif not any(facts.noted for facts in cache.facts.values()):
            unseen = "not known yet: run a step first"
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                own = f"{prefix}.{name}" if prefix else name
                rows.append(row(own, stage, parameter, cache.sightings.find(parameter), unseen))
    return DeferralReport(tuple(rows))
