"""F, B and W of one microbatch on one stage, each in the stage's worker, with a graph of its own for each microbatch.

    F    values from other stages ── enter ──> layers ──> values for other stages
    B    gradients of those ──> autograd, in that graph, to where values entered ──> gradients for their stages
    W    what B left in the ledger ──> sums of weight gradients

A value enters as a node's output: a layer may write to it in place, as it may to any other's output. What the graph
holds is freed with B, but for what W needs. Gradients are captured, see there.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import unleaf
from splitpipe.core.rng import Seeds, going_back
from splitpipe.core.thread_state import State
from splitpipe.deferral.ledger import Ledger
from splitpipe.skip.box import Key
from splitpipe.stage.checkpoint import Batch, Frame
from splitpipe.stage.stage import Parcel, Result, Stage, Task
from splitpipe.training.exchange import Post
from splitpipe.training.gradients import Capture, Grads, Graph
from splitpipe.training.loss import Reduction
from splitpipe.training.record import Reel

Edges = Sequence[GradientEdge]


class Held(NamedTuple):
    """What F of one (stage, microbatch) leaves for its B.

    Attributes:
        value: where the stage's output left the graph; of what requires grad alone.
        skips: the same of each skip that it stashed for another stage.
        entered: how many tensors that require grad entered over each skip, the stage's input as None.
        graph: what is between.
        frame: if it is checkpointed.
    """

    value: Edges
    skips: Mapping[Key, Edges]
    entered: Mapping[Key | None, int]
    graph: Graph
    frame: Frame | None


@dataclass(frozen=True)
class Common:
    """What all stages of a pass have in common.

    Args:
        post: between the stages.
        popped: the stage that pops each skip that another one, or the caller, gives.
        stashed: the stage that gives it; the caller's are not in it.
        reduction: of the losses.
        state: the caller's thread-local state.
        around: the state that the workers are in.
        variables: the context variables of each microbatch.
        seeds: of every (stage, microbatch).
        stop: the first microbatch that is not checkpointed.
        batch: what the microbatches are parts of.
        last: stage.
    """

    post: Post
    popped: Mapping[Key, int]
    stashed: Mapping[Key, int]
    reduction: Reduction
    state: State
    around: State
    variables: Sequence[Context]
    seeds: Seeds
    stop: int
    batch: Batch
    last: int


class Passes:
    """The passes of one stage.

    Args:
        stage: the stage.
        ledger: where W finds what B left; None leaves weight gradients to autograd.
        capture: goes backward.
        common: to all stages.
        reel: what its passes are recorded on; None if they are not.

    Attributes:
        given: the gradients of what came from the caller: of each microbatch's input (None) and target.
        differentiable: whether an output of the stage requires grad.
    """

    def __init__(
        self, stage: Stage, ledger: Ledger | None, capture: Capture, common: Common, reel: Reel | None
    ) -> None:
        self._stage = stage
        self._ledger = ledger
        self._capture = capture
        self._common = common
        self.reel = reel
        self._timed = None if reel is None else reel.copied
        self._held: dict[int, Held] = {}
        self._arriving = [key for key, target in common.popped.items() if target == stage.index]
        self.given: dict[tuple[Key | None, int], Grads] = {}
        self.differentiable = False

    def forward(self, i: int) -> None:
        """F."""
        stage, common, j = self._stage, self._common, self._stage.index
        value: Parcel = common.post.take(j, ("F", i, j))
        skips: dict[Key, Parcel] = {key: common.post.take(j, (key, i)) for key in self._arriving}
        reel = self.reel
        if reel is not None:
            reel.start()
        entered: dict[Key | None, list[GradientEdge]] = {}
        first = _get_sequence_nr()
        if common.state.grad:
            with stream.use(stage.compute):
                value, entered[None] = enter(value)
                for key, parcel in skips.items():
                    skips[key], entered[key] = enter(parcel)
        state = common.state if reel is None or reel.weigh != i else self._weighing(common.state, reel)
        result = Task(
            stage=stage,
            number=(i, len(common.variables)),
            value=value,
            skips=skips,
            state=state,
            inside=state is common.around,
            variables=common.variables[i],
            seed=common.seeds.of(j, i),
            checkpoint=i < common.stop,
            batch=common.batch,
        )()
        if reel is not None:
            reel.stop()
        self._send(i, result)  # First of all: somebody may be waiting.
        if result.drew:
            common.seeds.drew = True
        if common.state.grad:
            self._hold(i, result, entered, range(first, _get_sequence_nr()))

    def _weighing(self, state: State, reel: Reel) -> State:
        """The state in which what the layers save is counted, unless the user's hooks see it."""
        return state if state.hooks is not None or state.hooks_disabled else replace(state, hooks=reel.counting())

    def _hold(self, i: int, result: Result, entered: Mapping[Key | None, list[GradientEdge]], numbers: range) -> None:
        value, skips = _edges(result.value), {key: _edges(parcel) for key, parcel in result.skips.items()}
        gate = None if self._ledger is None else self._ledger.phony_edge
        # Of each microbatch anew: a layer may use another leaf for each, and a node takes a fifth of a microsecond.
        graph = self._capture.graph(
            [edge for edges in (value, *skips.values()) for edge in edges],
            [edge for edges in entered.values() for edge in edges],
            numbers,
            gate,
        )
        self.differentiable = self.differentiable or bool(value)
        counts = {key: len(edges) for key, edges in entered.items()}
        self._held[i] = Held(value, skips, counts, graph, result.frame)

    def _send(self, i: int, result: Result) -> None:
        common, j = self._common, self._stage.index
        if j == common.last:
            common.reduction.add(i, result.value.leaves)
        else:
            self._give(j + 1, ("F", i, j + 1), result.value)
        for key, parcel in result.skips.items():
            self._give(common.popped[key], (key, i), parcel)

    def _give(self, target: int, key: Any, parcel: Parcel) -> None:
        differentiable = set(parcel.differentiable)

        def made(leaves: Sequence[Any]) -> Parcel:
            plain = [leaf.requires_grad_() if k in differentiable else leaf for k, leaf in enumerate(leaves)]
            return parcel.holding(plain)

        plain = [leaf.detach() if k in differentiable else leaf for k, leaf in enumerate(parcel.leaves)]
        self._common.post.send(self._stage.index, target, key, plain, made, self._timed)

    def backward(self, i: int) -> None:
        """B, or BW if the ledger has it so."""
        held, reel, common = self._held.pop(i), self.reel, self._common
        if held.frame is not None:
            if reel is not None:
                reel.start()
            held.frame.recompute()  # Before it waits for its gradient.
            if reel is not None:
                reel.stop()
        roots, grads = self._roots(i, held)
        if reel is not None:
            reel.start()
        recomputing = going_back(self._stage.known, common.seeds, side_by_side=common.post.side_by_side)
        with stream.use(self._stage.compute), recomputing:
            found = self._capture.backward(roots, grads, held.graph)
        counts = held.entered
        del held, roots, grads
        if reel is not None:
            reel.stop()
            if reel.weigh == i and self._ledger is not None:
                reel.kept = self._ledger.held(i)
        self._return(i, counts, iter(found))

    def _roots(self, i: int, held: Held) -> tuple[list[Any], list[Tensor]]:
        """Where autograd starts, and with which gradients."""
        common, j = self._common, self._stage.index
        pairs: list[tuple[Any, Tensor | None]] = []
        if held.value:
            with stream.use(self._stage.compute):
                given = [common.reduction.seed(i)] if j == common.last else common.post.take(j, ("B", i, j))
            pairs += zip(held.value, given)
        for key, edges in held.skips.items():
            if edges:
                pairs += zip(edges, common.post.take(j, ("B", key, i)))
        used = [(edge, grad) for edge, grad in pairs if grad is not None]
        return [edge for edge, _ in used], [grad for _, grad in used]

    def _return(self, i: int, counts: Mapping[Key | None, int], found: Iterator[Tensor | None]) -> None:
        common, j = self._common, self._stage.index
        for key, count in counts.items():
            grads = list(islice(found, count))
            source = common.stashed.get(key) if key is not None else j - 1 if j else None
            if source is None:
                self.given[key, i] = grads
            elif grads:
                name = ("B", i, source) if key is None else ("B", key, i)
                common.post.send(j, source, name, grads, list, self._timed)

    def weigh(self, microbatches: Sequence[int]) -> None:
        """W."""
        if self.reel is not None:
            self.reel.start()
        if self._ledger is not None:
            with stream.use(self._stage.compute):
                self._ledger.backward_weight(microbatches)
        if self.reel is not None:
            self.reel.stop()

    def close(self) -> None:
        """The stage has done all its passes."""
        # Its views of weights would keep the nodes that accumulate gradients, which are of the streams that layers may
        # compute on: the release makes them anew.
        self._stage.register = None


def enter(parcel: Parcel) -> tuple[Parcel, list[GradientEdge]]:
    """The parcel's values as nodes' outputs, and the edges to those nodes.

    Args:
        parcel: of leaves.
    """
    numbers = parcel.differentiable
    if not numbers:
        return parcel, []
    leaves = list(parcel.leaves)
    for number in numbers:
        leaves[number] = unleaf(leaves[number])
    # With what keeps the nodes: a stage that does not use a value lets go of it, and of the node that made it.
    return parcel.holding(leaves), [get_gradient_edge(leaves[number]) for number in numbers]


def _edges(parcel: Parcel) -> Edges:
    # The edges alone: the tensor itself may be freed, or written to by the next stage.
    return [get_gradient_edge(parcel.leaves[k]) for k in parcel.differentiable]
