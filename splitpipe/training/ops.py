"""F, B and W of one microbatch on one stage, each in the stage's worker, with a graph of its own for each microbatch.

    F    values from other stages ── enter ──> layers ──> values for other stages
    B    gradients of those ──> autograd, in that graph, to where values entered ──> gradients for their stages
    W    what B left in the ledger ──> sums of weight gradients

A value enters as a node's output: a layer may write to it in place, as it may to any other's output. What the graph
holds is freed with B, except what W needs. Gradients are captured: see ``gradients``.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import Identity
from splitpipe.core.mailbox import Exchange
from splitpipe.core.rng import torch_checkpoint_rng
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.deferral.ledger import Ledger
from splitpipe.skip.box import Key
from splitpipe.stage.call import Call, Parcel
from splitpipe.stage.checkpoint import Frame
from splitpipe.stage.stage import Result, Stage, Task
from splitpipe.training.gradients import Capture, Grads, Graph
from splitpipe.training.loss import TARGET, Reduction
from splitpipe.training.record import StageTrace

Edges = Sequence[GradientEdge]


class InFlight(NamedTuple):
    """The values that F of one (stage, microbatch) keeps for its B; only for tensors that require grad."""

    #: The edges by which the stage's output left the graph, and each skip that it stashed for another stage.
    value: Edges
    skips: Mapping[Key, Edges]
    #: The number of tensors that entered over each skip, the stage's input as None.
    entered: Mapping[Key | None, int]
    graph: Graph
    frame: Frame | None


@dataclass(frozen=True, eq=False)
class Shared:
    """The data that the ops of all stages share in one call; ``around`` is the state that the workers are in."""

    call: Call
    exchange: Exchange
    reduction: Reduction
    around: State
    skips: Mapping[Key, tuple[int, int]]
    last: int


class StageOps:
    """The ops of one stage. Without a ledger, from which W takes what B left, B computes the weight gradients, too."""

    def __init__(
        self, stage: Stage, ledger: Ledger | None, capture: Capture, shared: Shared, trace: StageTrace | None
    ) -> None:
        self.stage = stage
        self._ledger = ledger
        self._capture = capture
        self._shared = shared
        self.trace = trace
        self._timed = None if trace is None else trace.copied
        self._in_flight: dict[int, InFlight] = {}
        self._arriving = [*stage.own.arriving, TARGET] if stage.index == shared.last else stage.own.arriving
        #: The gradients of the caller's values: of each microbatch's input (key None) and target.
        self.given: dict[tuple[Key | None, int], Grads] = {}
        #: True if an output of the stage requires grad.
        self.differentiable = False

    def forward(self, i: int) -> None:
        """F."""
        stage, shared, j = self.stage, self._shared, self.stage.index
        value: Parcel = shared.exchange.receive(j, ("F", i, j))
        skips: dict[Key, Parcel] = {key: shared.exchange.receive(j, (key, i)) for key in self._arriving}
        trace = self.trace
        if trace is not None:
            trace.start()
        entered: dict[Key | None, list[GradientEdge]] = {}
        first = _get_sequence_nr()
        if shared.call.state.grad:
            with stream.use(stage.compute):
                value, entered[None] = enter(value)
                for key, parcel in skips.items():
                    skips[key], entered[key] = enter(parcel)
        state = shared.call.state
        if trace is not None and trace.measured_microbatch == i:
            state = self._measuring(state, trace)
        result = Task(stage, shared.call, i, value=value, skips=skips, state=state, inside=state is shared.around)()
        if trace is not None:
            trace.stop()
        self._send(i, result)  # First of all: somebody may be waiting.
        if shared.call.state.grad:
            self._keep(i, result, entered, range(first, _get_sequence_nr()))

    def _measuring(self, state: State, trace: StageTrace) -> State:
        """The state with hooks that count the bytes saved by layers, unless the user has hooks there."""
        return state if state.hooks is not None or state.hooks_disabled else state._replace(hooks=trace.counting())

    def _keep(self, i: int, result: Result, entered: Mapping[Key | None, list[GradientEdge]], numbers: range) -> None:
        value, skips = edges_of(result.value), {key: edges_of(parcel) for key, parcel in result.skips.items()}
        phony = None if self._ledger is None else self._ledger.phony_edge
        # Found again for each microbatch: a layer may use another leaf in each, and a node takes 0.2 microseconds.
        graph = self._capture.graph(
            [edge for edges in (value, *skips.values()) for edge in edges],
            [edge for edges in entered.values() for edge in edges],
            numbers,
            phony,
        )
        self.differentiable = self.differentiable or bool(value)
        counts = {key: len(edges) for key, edges in entered.items()}
        self._in_flight[i] = InFlight(value, skips, counts, graph, result.frame)

    def _send(self, i: int, result: Result) -> None:
        shared, j = self._shared, self.stage.index
        if j == shared.last:
            shared.reduction.add(i, result.value.leaves[-1])
        else:
            self._give(j + 1, ("F", i, j + 1), result.value)
        for key, parcel in result.skips.items():
            self._give(shared.skips[key][1], (key, i), parcel)

    def _give(self, target: int, key: Any, parcel: Parcel) -> None:
        differentiable = set(parcel.differentiable)

        def made(leaves: Sequence[Any]) -> Parcel:
            plain = [leaf.requires_grad_() if k in differentiable else leaf for k, leaf in enumerate(leaves)]
            return parcel.holding(plain)

        plain = [leaf.detach() if k in differentiable else leaf for k, leaf in enumerate(parcel.leaves)]
        self._shared.exchange.send(self.stage.index, target, key, plain, make=made, timed=self._timed)

    def backward(self, i: int) -> None:
        """B, or BW if the ledger has it so."""
        flight, trace = self._in_flight.pop(i), self.trace
        if flight.frame is not None:
            if trace is not None:
                trace.start()
            flight.frame.recompute()  # Before it waits for its gradient.
            if trace is not None:
                trace.stop()
        found = self._differentiate(i, *self._roots(i, flight), flight.graph)
        self._return(i, flight.entered, iter(found))

    def _differentiate(self, i: int, roots: list[Any], grads: list[Tensor], graph: Graph) -> Grads:
        """The gradients of what entered the stage."""
        trace, shared = self.trace, self._shared
        if trace is not None:
            trace.start()
        side_by_side = shared.exchange.side_by_side
        recomputing = torch_checkpoint_rng(self.stage.facts, shared.call.seeds, side_by_side=side_by_side)
        with stream.use(self.stage.compute), recomputing:
            found = self._capture.backward(roots, grads, graph)
        if trace is not None:
            trace.stop()
            if trace.measured_microbatch == i and self._ledger is not None:
                trace.kept = self._ledger.size(i)
        return found

    def _roots(self, i: int, flight: InFlight) -> tuple[list[Any], list[Tensor]]:
        """The edges that autograd starts from, and their gradients."""
        shared, j = self._shared, self.stage.index
        pairs: list[tuple[Any, Tensor | None]] = []
        if flight.value:
            with stream.use(self.stage.compute):
                given = shared.reduction.seeds(i) if j == shared.last else shared.exchange.receive(j, ("B", i, j))
            pairs += zip(flight.value, given)
        for key, edges in flight.skips.items():
            if edges:
                pairs += zip(edges, shared.exchange.receive(j, ("B", key, i)))
        used = [(edge, grad) for edge, grad in pairs if grad is not None]
        return [edge for edge, _ in used], [grad for _, grad in used]

    def _return(self, i: int, counts: Mapping[Key | None, int], found: Iterator[Tensor | None]) -> None:
        shared, j = self._shared, self.stage.index
        for key, count in counts.items():
            grads = list(islice(found, count))
            source = self._source(key)
            if source is None:
                self.given[key, i] = grads
            elif grads:
                name = ("B", i, source) if key is None else ("B", key, i)
                shared.exchange.send(j, source, name, grads, make=list, timed=self._timed)

    def _source(self, key: Key | None) -> int | None:
        """The stage that a skip comes from, or the input, as None; None if the caller gave it."""
        if key is None:
            return self.stage.index - 1 if self.stage.index else None
        return self._shared.skips[key][0] if key in self._shared.skips else None

    def backward_weight(self, microbatches: Sequence[int]) -> None:
        """W."""
        if self.trace is not None:
            self.trace.start()
        if self._ledger is not None:
            with stream.use(self.stage.compute):
                self._ledger.backward_weight(microbatches)
        if self.trace is not None:
            self.trace.stop()

    def close(self) -> None:
        """The stage has done all its ops."""
        if self._ledger is not None:
            self._ledger.close()
        # Its views of weights would keep AccumulateGrad nodes, which belong to the streams that layers may
        # compute on: the release makes them again.
        self.stage.register = None


class Enter(Identity):
    """The tensor, as a node's output. B captures the gradient that arrives here; the node itself never runs."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> None:
        if grad is None:
            return
        raise RuntimeError(
            "a gradient arrived at a stage's input, of which its schedule knows nothing, and which the stages before "
            "would lose. Something went backward through a tensor from inside a scheduled step: expected every term "
            "of the loss in loss_fn(output, target), layers that call no backward(), and between stages tensors in a "
            "nesting of tuple, list, dict or namedtuple, not inside of other objects."
        )


def enter(parcel: Parcel) -> tuple[Parcel, list[GradientEdge]]:
    """The parcel with its values as nodes' outputs, and the edges to those nodes."""
    numbers = parcel.differentiable
    if not numbers:
        return parcel, []
    leaves = list(parcel.leaves)
    for number in numbers:
        leaves[number] = Enter.apply(leaves[number])
    # Edges keep the nodes alive: a stage that does not use a value drops it, and the node that made it.
    return parcel.holding(leaves), [get_gradient_edge(leaves[number]) for number in numbers]


def edges_of(parcel: Parcel) -> Edges:
    """The edges by which a value leaves its graph."""
    # The edges alone: the tensor itself may be freed, or written to by the next stage.
    return [get_gradient_edge(parcel.leaves[k]) for k in parcel.differentiable]
