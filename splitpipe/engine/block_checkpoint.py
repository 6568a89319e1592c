"""Checkpointed blocks of any module, in chains: blocks that follow each other are one node of their segment's graph.

    h ──> Chain ──token──┬──> Outputs of block 0 ──> h0       h0 went into block 1 alone: nothing runs this node
                         └──> Outputs of block 1 ──> h1 ──> ...

A block runs with grad, as a stage of a Sequential does. Then an Outputs node takes the place of its graph, and keeps
the gradients that arrive in B. Autograd runs Chain after all of them: it runs the blocks again, then one backward
through them. A node a block would take the host twice as long.

All activations of a chain exist at once. So it ends where the outputs of its blocks exceed a number of bytes; and where
a block uses a value with a graph that neither entered the chain nor comes from it unchanged, which would be a cycle.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from splitpipe.backward.graph_walk import walk
from splitpipe.core import thread_state
from splitpipe.core.note import add_note
from splitpipe.core.random_numbers import RNGStates
from splitpipe.core.tensors import sharing, version_of
from splitpipe.core.thread_state import State
from splitpipe.engine.crossing import changed
from splitpipe.engine.step import StepRun
from splitpipe.loss.numbers import Number
from splitpipe.loss.trace import Trace
from splitpipe.partition.attributes import Attributes
from splitpipe.stage.recomputation import CheckpointedRun, Modules
from splitpipe.stage.segment import RunningStage, Segment
from splitpipe.stage.shared_parameters import SharedParameters

#: The bytes of the outputs of a chain's blocks. A block saves ten to twenty times as much for its backward.
_CAP = 64 * 1024**2


class BlockChains:
    """The checkpointed blocks of one microbatch."""

    def __init__(self, step: StepRun, i: int, shared: SharedParameters, attributes: Attributes) -> None:
        self.step, self.i, self._shared, self.attributes = step, i, shared, attributes
        self._chain: BlockChain | None = None
        self._token: Tensor | None = None

    def end(self) -> None:
        """Ends the chain, at a split point."""
        self._chain = self._token = None

    def run(
        self, stage: RunningStage, modules: Modules, described: str, call: Callable[..., Any], args: Any,
        kwargs: dict[str, Any], trace: Trace | None,
    ) -> Any:
        """The output of a block's call, which has a node of the chain in place of the block's own graph."""
        state, inputs = thread_state.capture(), _tensors([*args, *kwargs.values()])
        versions, ids = [version_of(x) for x in inputs], {*map(id, inputs)}
        run = CheckpointedRun(modules, RNGStates(self.step.call.draws, stage.device), described)
        with trace or nullcontext():
            output = run.first(partial(call, *args, **kwargs))
        made = _tensors(output)
        places = {id(y): k for k, y in enumerate(made) if y.grad_fn is not None and id(y) not in ids}
        distinct = [made[k] for k in places.values()]
        written = versions != [version_of(x) for x in inputs]
        numbers = trace is not None and any([isinstance(trace.ledger.of(x), Number) for x in made])
        if not places or written or numbers or sharing(distinct, inputs):
            return output  # With its graph: R would get other inputs; numbers' terms or views would have lost theirs.
        if self.step.drop_in:
            ends = {x.grad_fn for x in inputs if x.grad_fn is not None}
            self._shared.reach(stage, walk([get_gradient_edge(y) for y in distinct], ends, False).reached)
        chain, tracked = self._chain, [*{id(x): x for x in inputs if x.requires_grad}.values()]
        if chain is None or chain.size >= _CAP or any([chain.place_of(x) is None for x in tracked]):
            chain = self._chain = BlockChain(self, stage, tracked)
            phony = torch.empty(0, device=stage.device, requires_grad=True)  # For its thread, if no input has a graph.
            self._token = _Chain.apply(chain, phony, *tracked)
        arguments = changed((args, kwargs), chain.enter)
        chain.repeats.append((described, partial(_repeat, call, run, state, arguments, [*places.values()])))
        stand = _Outputs.apply(chain, len(chain.versions), self._token, [y.detach() for y in distinct])
        if trace is not None:
            for y, z in zip(distinct, stand):
                trace.ledger.link(y, z)
        chain.versions += map(version_of, stand)
        chain.size += sum([y.nbytes for y in stand])
        standing = dict(zip(places, stand))
        return changed(output, lambda y: standing.get(id(y), y))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a nesting."""
    found: list[Tensor] = []
    changed(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


class _Place(int):
    """In place of a tensor that a block was given: the number of the chain's input or, from -1 down, of its output."""

    device = torch.device("cpu")  # For which a PackedSequence of places asks.


def _repeat(
    call: Callable[..., Any], run: CheckpointedRun, state: State, arguments: Any, places: Sequence[int],
    made: Sequence[Tensor], inputs: Sequence[Tensor],
) -> list[Tensor]:
    """R of a block: the outputs that have a graph, from those of earlier blocks and the chain's inputs.

    ``arguments``: with places, since tensors have graphs, which refer to this; ``places``: of these outputs in all.
    """
    args, kwargs = changed(arguments, lambda k: inputs[k] if k >= 0 else made[~k], _Place)
    with thread_state.use(state):
        found = _tensors(run.recompute(partial(call, *args, **kwargs)))
    return [found[k] for k in places]


class BlockChain:
    """Checkpointed blocks that follow each other: their calls, and what entered."""

    def __init__(self, of: BlockChains, stage: RunningStage, tracked: Sequence[Tensor]) -> None:
        # A weak reference, since the step refers to the graph, of which this is a part.
        self._step, self._stage, self._i = weakref.ref(of.step), stage.index, of.i
        self._attributes = of.attributes
        self.repeats: list[tuple[str, Callable[..., list[Tensor]]]] = []  #: A description of each block, and its R.
        #: Tensors that entered, by identity and version. Those that require grad come first.
        self._inputs = {(id(x), version_of(x)): (_Place(k), x) for k, x in enumerate(tracked)}
        self._tracked = len(tracked)
        self.versions: list[int | None] = []  #: Of the outputs.
        self.size = 0
        self.grads: dict[int, Tensor] = {}  #: Of the outputs, by number.

    def enter(self, x: Tensor) -> _Place:
        """Where the chain has a tensor, which enters if it is new."""
        place = self.place_of(x)
        if place is None:
            place = _Place(len(self._inputs))
            self._inputs[id(x), version_of(x)] = place, x
        return place

    def place_of(self, x: Tensor) -> _Place | None:
        """Where the chain has a tensor; None if it is new."""
        version, node = version_of(x), x.grad_fn
        # Its gradient would pass a hook by, or .grad. As an input of another chain, it gets the whole gradient.
        if getattr(node, "chain", None) is self and not x._backward_hooks and not x.retains_grad:
            number = node.first + x.output_nr  # type: ignore[union-attr]
            return _Place(~number) if self.versions[number] == version else None
        found = self._inputs.get((id(x), version))
        return None if found is None else found[0]

    def backward(self) -> Sequence[Tensor | None]:
        """R and B of the blocks, called by autograd; the gradients of the inputs that require grad."""
        step = self._step()
        if step is None or (own := step.stages[self._stage].fwd_cache.get(self._i)) is not None and not own.ran:
            raise RuntimeError(
                "a checkpointed block was run backward before its stage was, or without it: between blocks, from a "
                "tensor that a hook or an attribute has kept, or in an autograd.Function or torch.func transform. "
                "Expected these inside a block, and each term of the loss in the output; or checkpoint='never'."
            )
        stage, segment = step.stages[self._stage], Segment()
        step.launching.take(stage.compute)
        try:
            stage.store.finish()
            self._recompute(step, stage, segment)
            gradients = step.differentiate(stage, segment, keep=False)
            if step.wants_weights:
                stage.store.add(self._i, gradients)
            return gradients.entries
        finally:
            step.launching.give()

    def _recompute(self, step: StepRun, stage: RunningStage, segment: Segment) -> None:
        """R of the blocks, as a segment to which the gradients of their outputs have come."""
        grads, self.grads = self.grads, {}
        if any([version_of(x) != version for (_, version), (_, x) in self._inputs.items()]):
            raise RuntimeError(
                "an input of a checkpointed block was written to in place after its forward, which is recomputed: "
                "expected it as it was. Write to a copy (x.clone())."
            )
        inputs, made = [x.detach() for _, x in self._inputs.values()], list[Tensor]()
        inputs[: self._tracked] = segment.enter(inputs[: self._tracked], [(None, k) for k in range(self._tracked)])
        for described, repeat in self.repeats:
            try:
                made += repeat(made, inputs)
            except BaseException as error:
                add_note(error, f"in the recomputation of {described}, {stage.name}, microbatch {self._i}")
                raise
        for x in inputs:
            if x._backward_hooks:
                x._backward_hooks.clear()  # A block's hooks of its arguments: those of the forward are called.
        self._attributes.withdraw(stage.index)
        for number, grad in grads.items():
            y = made[number]
            if not y.requires_grad or (y.shape, y.dtype) != (grad.shape, grad.dtype):
                raise RuntimeError(
                    f"a checkpointed block on {stage.name} returned other outputs in its recomputation than in its "
                    "forward: expected blocks that depend on inputs and parameters alone, or checkpoint='never'."
                )
            segment.arrived.append((segment.leave(y), grad, None))
        segment.close(step.split, stage.own)


class _Chain(Function):
    """A phony that depends on the inputs of a chain; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, chain: BlockChain, phony: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chain = chain
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.chain.backward()


class _Outputs(Function):
    """The outputs of a block; its backward keeps their gradients for the chain, which runs after it."""

    @staticmethod
    def forward(ctx: Any, chain: BlockChain, first: int, token: Tensor, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.chain, ctx.first = chain, first
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.chain.grads.update({ctx.first + k: grad for k, grad in enumerate(grads) if grad is not None})
        return None, None, None, None
