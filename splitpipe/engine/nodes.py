"""The blocks of any module, each a node of the surrounding graph; if checkpointed, recomputed separately.

A segment can't be recomputed: its Python frame can't be entered twice. A block's recomputation precedes its node.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from splitpipe.batch import outputs
from splitpipe.core import microbatch, thread_state
from splitpipe.core.graph import rank_of, reached
from splitpipe.core.microbatch import Flat
from splitpipe.core.rng import RngMode
from splitpipe.core.tensors import sharing
from splitpipe.deferral.function import Caller, calling
from splitpipe.engine.code import CodeForward
from splitpipe.engine.values import SIMPLE, Follow, Values, replay
from splitpipe.loss.tracing import TracedBlock
from splitpipe.stage.call import Activation, Call
from splitpipe.stage.checkpoint import checkpointed
from splitpipe.stage.containers import changes, containers, copies, marked, spent, verify_once
from splitpipe.stage.layers import BlockLayers, ModelLayers, StageCache, StageFacts
from splitpipe.stage.run import SeparateRun, may_be_plain, plain
from splitpipe.stage.stage import Block, Stage
from splitpipe.stage.task import Task
from splitpipe.training.loss import Losses
from splitpipe.training.recomputed import Recomputed, may_be_made_again, outputs_of
from splitpipe.training.sink import Keyed, Sink


class BlockNodes:
    """The blocks of one call."""

    def __init__(
        self, call: Call, stages: Sequence[Stage], layers: ModelLayers, cache: Callable[[nn.Module, int], StageCache]
    ) -> None:
        self._call = call
        self._stages = stages
        self._layers = layers
        self._cache = cache
        self._blocks: dict[tuple[nn.Module, int], Block] = {}

    def checkpointed(
        self,
        forward: CodeForward,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        follow: bool,
    ) -> Any:
        """The value of a block's call, and what it has changed in lists and dicts among its arguments."""
        stage = self._stage(forward, block)
        given, nesting = _apart(args, kwargs)
        facts = stage.facts
        if may_be_plain(stage) and not facts.in_place and not follow and not isinstance(call, TracedBlock):
            found = self._again(forward, stage, call, given, nesting)
            self._note_draws(forward, facts)
            if found is not None:
                return found, {}
        whose = f"the arguments of {stage.own.described[0]}"
        for leaf in spent(given):
            raise TypeError(
                f"{stage.own.described[0]} is checkpointed, and was given a {type(leaf).__name__}, which is used up "
                "when the block is recomputed: expected a list or tuple, or checkpoint='never'."
            )
        leaves, spec = microbatch.flatten(Flat(given), whose)
        value = Activation(leaves, spec, sharing(leaves))  # When recomputed, they are separate tensors.
        nestings: list[Any] = []
        count = len(containers(args, kwargs))
        layer = _flat(_following(forward.values, call) if follow else call, nesting, nestings, count)
        result = _BlockTask(stage, self._call, forward, value, layer)()
        self._note_draws(forward, facts)
        frame, made = result.frame, result.value
        # Values that share memory stay as they are, since the forward may write to them: what they save checks for it.
        shared = _sharing(made.leaves, value.leaves)
        leaves = [
            checkpointed(leaf, frame, rank_of(leaf))
            if frame is not None and k not in shared and isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf
            for k, leaf in enumerate(made.leaves)
        ]
        [nesting] = nestings
        return (leaves[0], {}) if nesting is None else outputs.unflatten(leaves, nesting)

    def _note_draws(self, forward: CodeForward, facts: StageFacts) -> None:
        """Records that a stage draws if one of its blocks does."""
        if facts.rng is RngMode.EXCLUSIVE:
            self._stages[forward.stage].facts.rng = RngMode.EXCLUSIVE

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""
        return [((own.own,), own.parameters.tensors) for (_, number), own in self._blocks.items() if number == stage]

    def _again(
        self, forward: CodeForward, stage: Block, call: Callable[..., Any], given: list[Any], nesting: Any
    ) -> Any:
        """The value of a plain block's call, as a node; None if this call isn't plain."""
        sink, state = self._stages[forward.stage].sink, thread_state.capture()
        if sink is None or self._stages[forward.stage].own.computed or not plain(given, state):
            return None
        if not isinstance(nesting, _Plain) and containers(*_together(given, nesting)):
            return None
        caller = stage.caller(forward.i)
        where = f"{stage.own.described[0]}, {stage}, microbatch {forward.i} of {len(self._call.rows)}"
        if caller is not None:
            caller.where = stage.own.described[0], where

        seed = self._call.seeds.of(forward.stage, forward.i)
        run = _Calling(call, nesting, caller)
        block = SeparateRun(stage, self._call, state, seed, given, run, where, held=forward.has_generator)
        made, made_of, _ = made_again(block, sink, given, forward.i)
        return made[0] if made_of is None else outputs.unflatten(made, made_of)

    def _stage(self, forward: CodeForward, block: nn.Module) -> Block:
        key = block, forward.stage
        stage = self._blocks.get(key)
        if stage is None:
            own = self._stages[forward.stage]
            layers = self._layers.blocks.get(key)
            if layers is None:
                layers = BlockLayers(own.index, own.own.place, [(forward.run.blocks.blocks[block], block)])
                self._layers.blocks[key] = layers
            stage = self._blocks[key] = Block(layers, self._cache(block, own.index), self._call, own.pending)
        return stage


def made_again(
    again: SeparateRun, sink: Sink, given: Sequence[Any], i: int, alone: bool = False
) -> tuple[list[Any], Any, Recomputed | None]:
    """The leaves of a checkpointed block's output, their nesting, and what its node has if it can be recomputed so.

    Args:
        again: the block on a microbatch.
        sink: takes the gradients of its parameters.
        given: the leaves of its arguments.
        i: the number of the microbatch.
        alone: whether it is a whole stage, whose outputs aren't written to while they share memory with other values.
    """
    stage = again.stage
    facts, parameters = stage.facts, stage.parameters.tensors
    # Before the run, or else a layer that uses another stream would be the first to ask for its weights' nodes.
    phony, ids = sink.phony((stage.own,), parameters)
    made, nesting, drew, count = again.first()
    again.call.seeds.drew |= drew
    own = {id(x): x for x in given if isinstance(x, Tensor)}
    if not alone and _sharing([x for x in made if id(x) not in own], given):  # The forward may write to them.
        facts.plain = False
    if facts.plain is None:
        seen = [x for x in made if not isinstance(x, Losses)]  # These have no graph.
        facts.plain = may_be_made_again(seen, given, stage.own.place.device)
    if count is None or not facts.plain:
        return made, nesting, None
    others: Sequence[Tensor] = ()
    if facts.foreign or facts.own_nodes != count:
        others = _foreign(made, again, parameters)
        facts.foreign, facts.own_nodes = facts.foreign or bool(others), count
    if others:
        phony, ids = sink.phony((stage.own, *map(id, others)), [*parameters, *others])

    blocks: list[Recomputed] = []

    def flight(places: list[tuple[int, Any]]) -> Recomputed:
        blocks.append(Recomputed(again, sink, i, ids, places, count, again.where, others))
        return blocks[0]

    made = outputs_of(made, own, flight, phony, again.entered)
    again.entered = []  # Their edges are the node's.
    for block in blocks if alone else ():  # Otherwise, there are other blocks, and two graphs take more memory.
        sink.made(i, block)
    return made, nesting, blocks[0] if blocks else None


class _Calling:
    """A block's call, given the leaves of its arguments; returns those of its output, and their nesting."""

    __slots__ = ("_call", "_caller", "_nesting")  # There are many: less for the garbage collector than a closure.

    def __init__(self, call: Callable[..., Any], nesting: Any, caller: Caller | None) -> None:
        self._call, self._nesting, self._caller = call, nesting, caller

    def __call__(self, leaves: list[Any]) -> tuple[list[Any], Any]:
        args, kwargs = _together(leaves, self._nesting)
        with calling(self._caller):
            made = self._call(*args, **kwargs)
        return ([made], None) if type(made) is Tensor else outputs.flatten(made)


class _BlockTask(Task):
    """One microbatch on one block."""

    notes = False

    def __init__(
        self, stage: Block, call: Call, forward: CodeForward, value: Activation, block: Callable[[Any], Any]
    ) -> None:
        super().__init__(stage, call, forward.i, value, {}, thread_state.capture(), inside=True)
        self.calls = [block]
        self.held = forward.has_generator


def _sharing(made: Sequence[Any], given: Sequence[Any]) -> frozenset[int]:
    """The places of those outputs of a block that share memory with each other, or with its inputs."""
    return sharing(made, [x for x in given if isinstance(x, Tensor)])


def _foreign(made: list[Any], run: SeparateRun, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The leaves to which a block's graph leads that aren't its parameters."""
    known = {*map(id, parameters), *map(id, run.entered)}
    tensors = [x for x in made if isinstance(x, Tensor)]
    roots = [(x.grad_fn, x.output_nr) for x in tensors if x.grad_fn is not None]
    ends = {(x.grad_fn, x.output_nr) for x in run.entered if x.grad_fn is not None}
    leaves = [x for x in tensors if x.grad_fn is None] + reached(roots, ends).leaves
    return [*{id(x): x for x in leaves if id(x) not in known and x.requires_grad}.values()]


def _flat(call: Callable[..., Any], given: Any, nestings: list[Any], count: int) -> Callable[[Any], Flat]:
    """A block's call, given the leaves of (args, kwargs) and their nesting, the first time and when it is recomputed.

    It returns the leaves of the block's output, with dataclasses flattened, and of what it has changed in its
    arguments.
    """

    def block(value: list[Any]) -> Flat:
        args, kwargs = _together(value, given)
        own = containers(args, kwargs)
        verify_once(own, count)
        before = copies(own)
        made = call(*args, **kwargs)
        if not own and type(made) is Tensor:
            nestings[:] = [None]
            return Flat([made])
        leaves, nesting = outputs.flatten((marked(made, own), changes(own, before)))
        nestings[:] = [nesting]
        return Flat(leaves)

    return block


class _Plain(NamedTuple):
    """The nesting of arguments without containers: how many are positional, and the names of the others."""

    positional: int
    names: tuple[str, ...]


def _apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of arguments and their nesting; arguments without containers, the usual case, need no pytree."""
    leaves = [*args, *kwargs.values()]
    if SIMPLE.issuperset(map(type, leaves)):
        return leaves, _Plain(len(args), tuple(kwargs))
    return outputs.flatten((args, kwargs))


def _together(leaves: list[Any], nesting: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``_apart`` flattened."""
    if isinstance(nesting, _Plain):
        return tuple(leaves[: nesting.positional]), dict(zip(nesting.names, leaves[nesting.positional :]))
    args, kwargs = outputs.unflatten(leaves, nesting)
    return args, kwargs


def _following(values: Values, call: Callable[..., Any]) -> Callable[..., Any]:
    """The block's call, whose functions get the same arguments as the first time when it is recomputed."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    first = [Follow(values.here, values.latest, values.asked, wrote=values.note_writes, seen=seen)]

    def block(*args: Any, **kwargs: Any) -> Any:
        with first.pop() if first else replay(seen):
            return call(*args, **kwargs)

    return block
