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
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import enter, kinds_of, pairs_of
from splitpipe.core.mailbox import Exchange
from splitpipe.core.rng import torch_checkpoint_rng
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.deferral.accumulator import Sums
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import PendingGrad, WeightGroup
from splitpipe.skip.box import Key
from splitpipe.stage.call import Call, Parcel
from splitpipe.stage.saved import made_other
from splitpipe.stage.stage import Again, Result, Stage, Task
from splitpipe.training.capture import Capture, Grads, Graph, Summed
from splitpipe.training.ledger import Ledger
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
    #: None where it is made in B.
    graph: Graph | None
    again: Checkpointed | None


class Checkpointed(NamedTuple):
    """What B makes the graph of a checkpointed microbatch of: its run, and the kinds of the first graph's nodes."""

    run: Again
    kinds: list[Any]


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
        self, stage: Stage, sums: Sums, ledger: Ledger | None, capture: Capture, shared: Shared,
        trace: StageTrace | None,
    ) -> None:
        self.stage = stage
        self._sums = sums
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
                value, entered[None] = entering(value)
                for key, parcel in skips.items():
                    skips[key], entered[key] = entering(parcel)
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
        self.differentiable = self.differentiable or bool(value)
        counts = {key: len(edges) for key, edges in entered.items()}
        if result.again is not None:
            kinds = kinds_of(pairs_of(chain(value, *skips.values())), {*pairs_of(chain(*entered.values()))})
            self._in_flight[i] = InFlight((), dict.fromkeys(skips, ()), counts, None, Checkpointed(result.again, kinds))
            return
        # Found again for each microbatch: a layer may use another leaf in each, and a node takes 0.2 microseconds.
        graph = self._capture.graph(
            [edge for edges in (value, *skips.values()) for edge in edges],
            [edge for edges in entered.values() for edge in edges],
            numbers,
            **self._deferring(i),
        )
        self._in_flight[i] = InFlight(value, skips, counts, graph, None)

    def _deferring(self, i: int) -> dict[str, Any]:
        """What Capture.graph is to be told of W."""
        ledger = self._ledger
        if ledger is None:
            return {}
        if not ledger.splits(i):
            return {"note": None if ledger.splits_any else self._note_none()}
        gains, note = ledger.gains(i), self.stage.note()
        return {"groups": ledger, "gains": gains, "note": note}

    def _note_none(self) -> Note | None:
        note = self.stage.note()
        if note is None:
            return None
        return lambda leaf, deferred, why: note(leaf, False, "the schedule has no W for it")

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
        if flight.again is not None:
            if trace is not None:
                trace.start()
            flight = self._again(i, flight, flight.again)  # Before it waits for its gradient.
            if trace is not None:
                trace.stop()
        assert flight.graph is not None
        found = self._differentiate(i, *self._roots(i, flight), flight.graph)
        self._return(i, flight.entered, iter(found))

    def _again(self, i: int, flight: InFlight, again: Checkpointed) -> InFlight:
        """The same, with the graph that another run of the stage has made."""
        first = _get_sequence_nr()
        entered, out, stashed = again.run()
        numbers = range(first, _get_sequence_nr())
        value, skips = edges_of(out), {key: edges_of(parcel) for key, parcel in stashed.items()}
        kinds = kinds_of(pairs_of(chain(value, *skips.values())), {*pairs_of(entered)})
        if kinds != again.kinds or skips.keys() != flight.skips.keys():
            raise made_other(kinds, again.kinds)
        roots = [edge for edges in (value, *skips.values()) for edge in edges]
        graph = self._capture.graph(roots, entered, numbers, **self._deferring(i))
        return InFlight(value, skips, flight.entered, graph, None)

    def _differentiate(self, i: int, roots: list[Any], grads: list[Tensor], graph: Graph) -> Grads:
        """The gradients of what entered the stage."""
        trace, shared = self.trace, self._shared
        if trace is not None:
            trace.start()
        side_by_side = shared.exchange.side_by_side
        recomputing = torch_checkpoint_rng(self.stage.facts, shared.call.seeds, side_by_side=side_by_side)
        with stream.use(self.stage.compute), recomputing:
            found = self._captured(i, roots, grads, graph)
        if trace is not None:
            trace.stop()
            if trace.measured_microbatch == i and self._ledger is not None:
                trace.kept = self._ledger.size(i)
        return found

    def _captured(self, i: int, roots: list[Any], grads: list[Tensor], graph: Graph) -> Grads:
        summed = Summed(self._sums, self.stage.compute)
        found, own = self._capture.backward(roots, grads, graph, partial(self._leave, i), summed)
        left = [(leaf, grad) for leaf, grad in zip(graph.leaves, own) if grad is not None]
        if left:
            with torch.no_grad():  # The worker's own grad mode is the forward's: each sum would be a new tensor.
                self._sums.add([leaf for leaf, _ in left], [grad for _, grad in left])
        return found

    def _leave(self, i: int, group: WeightGroup, new: PendingGrad) -> None:
        assert self._ledger is not None
        self._ledger.leave(group, new, i)

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
            with stream.use(self.stage.compute):
                self._ledger.settle()


def entering(parcel: Parcel) -> tuple[Parcel, list[GradientEdge]]:
    """The parcel with its values as nodes' outputs, and the edges to those nodes."""
    numbers = parcel.differentiable
    if not numbers:
        return parcel, []
    leaves = list(parcel.leaves)
    for number in numbers:
        leaves[number] = enter(leaves[number])
    # Edges keep the nodes alive: a stage that does not use a value drops it, and the node that made it.
    return parcel.holding(leaves), [get_gradient_edge(leaves[number]) for number in numbers]


def edges_of(parcel: Parcel) -> Edges:
    """The edges by which a value leaves its graph."""
    # The edges alone: the tensor itself may be freed, or written to by the next stage.
    return [get_gradient_edge(parcel.leaves[k]) for k in parcel.differentiable]
