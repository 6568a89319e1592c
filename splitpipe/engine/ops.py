"""Scheduled: the ops of a stage; each microbatch has a separate graph.

    R    if it is checkpointed, the stage is recomputed, which needs no gradient
    B    gradients of what later stages have taken ──> autograd ──> gradients of what has entered, sent back
    W    what B left in the ledger ──> sums of weight gradients

It is known which values cross only when they are used. A stage's B runs after those of all later stages, since each
sends a message to the one before, even without gradients: after that, no more of it will be taken. What the graph holds
is freed with B, except for what W needs. Gradients are captured: see ``training.capture``.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import unleaf
from splitpipe.core.rng import torch_checkpoint_rng
from splitpipe.deferral.accumulator import Sums
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import PendingGrad, WeightGroup
from splitpipe.engine.detaching import DetachedTransfer, Flight
from splitpipe.engine.forward import MicrobatchForward
from splitpipe.skip.box import Key
from splitpipe.stage.layers import StageFacts
from splitpipe.stage.stage import Stage
from splitpipe.training.capture import Capture, Grads, Graph, Summed
from splitpipe.training.ledger import Ledger
from splitpipe.training.op_rows import OpRun
from splitpipe.training.record import StageTrace
from splitpipe.training.sink import Ids, Prepared
from splitpipe.training.step import Shared


class StageOps:
    """The ops of one stage. Without a ledger, from which W takes what B left, B computes the weight gradients too."""

    def __init__(
        self,
        stage: Stage,
        sums: Sums,
        ledger: Ledger | None,
        capture: Capture,
        shared: Shared,
        trace: StageTrace | None,
        forwards: Sequence[MicrobatchForward],
        transfers: Sequence[DetachedTransfer],
    ) -> None:
        self.stage = stage
        self._sums = sums
        self._ledger = ledger
        self._capture = capture
        self._shared = shared
        self.trace = trace
        self._timed = None if trace is None else trace.copied
        stage.sink = self if shared.call.state.grad else None
        self._phony: Tensor | None = None
        self._last: dict[int, Prepared] = {}
        self._forwards = forwards
        self._transfers = transfers
        #: The gradients of the caller's values: for each microbatch, those of the input (key None) and the target.
        self.given: dict[tuple[Key | None, int], Grads] = {}
        #: True if an output of the stage requires grad.
        self.differentiable = False

    def phony(self, key: object, parameters: Sequence[Tensor]) -> tuple[Tensor, Ids]:
        """The phony of all blocks, which leads nowhere: B asks for its gradient."""
        if self._phony is None:
            with stream.use(self.stage.compute):
                self._phony = unleaf(torch.empty(0, device=self.stage.device, requires_grad=True))
        return self._phony, [[*map(id, parameters)]]

    def wanted(self, phony: Any, ids: Ids) -> set[int] | None:
        """All, since B reaches the phony."""
        return None

    def graph(
        self, i: int, roots: Sequence[GradientEdge], entered: Sequence[GradientEdge], numbers: range,
        block: StageFacts | None = None,
    ) -> Graph:
        """The graph of a microbatch on a recomputed block or stage, with these facts; None: on the whole stage."""
        facts = self.stage.facts if block is None else block
        return self._capture.graph(
            roots, entered, numbers, facts=facts, block=block is not None, **self._deferring(i)
        )

    def _phonies(self) -> list[GradientEdge]:
        """Edges through which autograd must run although nothing needs their gradients."""
        return [] if self._phony is None else [get_gradient_edge(self._phony)]

    def backward_block(
        self, i: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, wanted: set[int] | None,
        now: bool = False,
    ) -> Grads:
        """B of a microbatch on a block, inside B on the stage."""
        return self._captured(i, list(roots), list(grads), graph)

    def made(self, i: int, block: Prepared) -> None:
        """Records that a checkpointed stage has run."""
        self._last[i] = block

    def recompute(self, i: int) -> None:
        """R: recomputes the stage, which needs no gradient."""
        block, trace = self._last.get(i), self.trace
        if block is not None:
            if trace is not None:
                trace.start()
            block.prepare()
            if trace is not None:
                trace.stop()

    def begin(self) -> None:
        """Begins F, in the microbatch's thread."""
        if self.trace is not None:
            self.trace.start()

    def end(self, i: int) -> None:
        """Ends F."""
        j, trace = self.stage.index, self.trace
        if trace is not None:
            trace.stop()
            trace.note("F", (i,))
        if j == self._shared.last:
            self._shared.reduction.add(i, self._forwards[i].taken())
            self.differentiable = self.differentiable or bool(self._transfers[i].flights[j].value)

    def leave(self) -> None:
        """Ends the step: takes the ops out of their cycles."""
        self.stage.sink = None
        self._last.clear()
        for transfer in self._transfers:
            transfer.flights[self.stage.index] = Flight()

    def backward(self, i: int) -> None:
        """B, or BW, depending on the ledger."""
        shared, j, flight = self._shared, self.stage.index, self._transfers[i].flights[self.stage.index]
        pairs: list[tuple[GradientEdge, Tensor | None]] = []
        if j == shared.last:
            if flight.value:
                pairs += zip(flight.value, shared.reduction.seeds(i))
        else:
            word = shared.exchange.receive(j, ("B", i, j, j + 1))  # First: only afterwards is it known what was taken.
            for target, edges in flight.taken.items():
                pairs += zip(edges, word if target == j + 1 else shared.exchange.receive(j, ("B", i, j, target)))
        roots = [edge for edge, grad in pairs if grad is not None]
        grads = [grad for _, grad in pairs if grad is not None]
        entered = [edge for edges in flight.entered.values() for edge in edges]
        graph = self._capture.graph(
            roots, entered, flight.numbers, self._phonies(), facts=self.stage.facts, **self._deferring(i)
        )
        found = iter(self._differentiate(i, list(roots), grads, graph))
        self._transfers[i].flights[j] = Flight()  # Its edges keep the graph alive.
        self._last.pop(i, None)
        if self._ledger is not None and (self._ledger.splits(i) or not self._ledger.splits_any):
            self.stage.note()  # The other graphs have nothing to report.
        del pairs, roots, grads, entered, graph
        if j:
            flight.entered.setdefault(j - 1, [])
        for source, edges in flight.entered.items():
            returned = list(islice(found, len(edges)))
            if isinstance(source, int):
                shared.exchange.send(
                    j, source, ("B", i, source, j), returned, timed=self._timed if returned else None
                )
            else:
                self.given[source, i] = returned

    def _deferring(self, i: int) -> dict[str, Any]:
        """What Capture.graph must know about W."""
        ledger = self._ledger
        if ledger is None:
            return {}
        if not ledger.splits(i):
            return {"note": None if ledger.splits_any else self._note_none()}
        gains, note = ledger.gains(i), self.stage.note(done=False)
        return {"groups": ledger, "gains": gains, "note": note}

    def _note_none(self) -> Note | None:
        note = self.stage.note(done=False)
        if note is None:
            return None
        return lambda leaf, deferred, why: note(leaf, False, "the schedule has no W for it")

    def _differentiate(self, i: int, roots: list[Any], grads: list[Tensor], graph: Graph) -> Grads:
        """The gradients of what entered the stage."""
        trace, shared = self.trace, self._shared
        if trace is not None:
            trace.start()
        side_by_side = shared.exchange.side_by_side
        recomputing = torch_checkpoint_rng(self.stage.facts, shared.call.seeds, side_by_side=side_by_side)
        with recomputing:
            found = self._captured(i, roots, grads, graph)
        if trace is not None:
            trace.stop()
            if trace.measured_microbatch == i and self._ledger is not None:
                trace.kept = self._ledger.size(i)
        return found

    def _captured(self, i: int, roots: list[Any], grads: list[Tensor], graph: Graph) -> Grads:
        summed = Summed(self._sums, self.stage.compute)
        found, own = self._capture.backward(roots, grads, graph, partial(self._leave, i), summed)
        leaves = graph.leaves
        if any([grad is None for grad in own]):
            leaves = [leaf for leaf, grad in zip(leaves, own) if grad is not None]
            own = [grad for grad in own if grad is not None]
        if own:
            with torch.no_grad():  # The worker has the forward's grad mode, in which each sum would be a new tensor.
                self._sums.add(leaves, own)
        return found

    def _leave(self, i: int, group: WeightGroup, new: PendingGrad) -> None:
        assert self._ledger is not None
        self._ledger.leave(group, new, i)

    def backward_weight(self, microbatches: Sequence[int]) -> None:
        """W."""
        if self.trace is not None:
            self.trace.start()
        if self._ledger is not None:
            self._ledger.backward_weight(microbatches)
        if self.trace is not None:
            self.trace.stop()

    def close(self) -> None:
        """Called when the stage has done all its ops."""
        if self._ledger is not None:
            with stream.use(self.stage.compute):
                self._ledger.settle()


def do(op: OpRun, ops: StageOps) -> None:
    """Runs an op of a stage."""
    if op.kind == "R":
        ops.recompute(op.microbatches[0])
        return  # A part of B.
    if op.kind == "W":
        ops.backward_weight(op.microbatches)
    else:
        ops.backward(op.microbatches[0])
        if op.kind == "BW":
            ops.backward_weight(op.microbatches)
    if ops.trace is not None:
        ops.trace.note(op.kind, op.microbatches)
