"""Scheduled: what B leaves for W where a schedule says when each is to run.

    B of a microbatch    leaves a pending gradient for each call of a split function
    W of a microbatch    computes them, adds them to the worker's sums, and frees them

A ledger belongs to one stage in one call of the model. Nothing here is autograd's: a call's only edges are to its input
and to the phony's node, which leads nowhere; asked for its gradient, autograd goes through calls whose input needs
none.

Guarantee: one thread at a time touches a ledger and its sums. F, B and W of a stage run in its worker,
or in an autograd thread while that worker waits for it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import unleaf
from splitpipe.core.torch_private import _will_engine_execute_node
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.pending import PendingGrad, WeightGroup
from splitpipe.deferral.streams import Lane

#: Goes backward from some tensors, or their edges, given the gradients.
Backward = Callable[[Sequence[Any], Sequence[Tensor]], None]
Pending = dict[WeightGroup, list[PendingGrad]]


class GroupSums(NamedTuple):
    """The sums of a group's gradients, and the edges of those weights that are views, each with its sum."""

    totals: list[Total | None]
    views: list[tuple[GradientEdge, Total]]


class Ledger:
    """The pending gradients of one stage, by microbatch, until their W.

    Args:
        sums: of the stage.
        lane: the stage's streams.
        fused: microbatches whose weight gradients are computed right after the input gradient of each layer: BW.
        backward: goes on from the gradients of views to those of their parameters.
    """

    def __init__(self, sums: Sums, lane: Lane, fused: Collection[int], backward: Backward) -> None:
        self._sums = sums
        self._backward = backward
        self._lane = lane
        self.fused = fused
        self._phony: Tensor | None = None
        #: The edge to the phony's node, which all calls have; None if no function was called.
        self.phony_edge: GradientEdge | None = None
        self._groups: dict[WeightGroup, GroupSums] = {}
        self._pending: dict[int, Pending] = {}  # By microbatch.

    def phony(self, group: WeightGroup, weights: Sequence[Tensor]) -> Tensor:
        """See PendingStore."""
        totals = [self._sums.of(weight) if weight.is_leaf else Total(weight.dtype, weight.shape) for weight in weights]
        views = [(get_gradient_edge(x), total) for x, total in zip(weights, totals) if not x.is_leaf]
        given = iter(totals)
        self._groups[group] = GroupSums([None if kind is None else next(given) for kind in group.kinds], views)
        if self._phony is None:
            self._phony = unleaf(torch.empty(0, device=self._lane.device, requires_grad=True))
            self.phony_edge = get_gradient_edge(self._phony)
        return self._phony

    def microbatch(self, number: int, now: bool) -> MicrobatchLedger:
        """See PendingStore. The schedule says when pending gradients are computed, whoever asks for ``now``."""
        return MicrobatchLedger(self, number)

    def make_room(self) -> None:
        """See PendingStore: nothing, since the schedule makes room."""

    def put(self, microbatch: int, group: WeightGroup, new: PendingGrad) -> None:
        """Takes what a call of a microbatch has left."""
        apart = self._lane.apart
        if apart:
            self._lane.join(new.tensors())
        if microbatch in self.fused and not self._groups[group].views:  # Those go backward, which B is in the midst of.
            with stream.use(self._lane.compute) if apart else nullcontext():
                self._compute(group, [new])
        else:
            self._pending.setdefault(microbatch, {}).setdefault(group, []).append(new)

    def backward_weight(self, microbatches: Sequence[int]) -> None:
        """W: computes and frees what some microbatches have left, those of equal weights together."""
        found: Pending = {}
        for microbatch in microbatches:
            for group, pending in self._pending.pop(microbatch, {}).items():
                found.setdefault(group, []).extend(pending)
        while found:
            group = next(iter(found))
            self._compute(group, found.pop(group))

    def held(self, microbatch: int) -> int:
        """How many bytes the pending gradients of a microbatch hold."""
        return sum(each.size for pending in self._pending.get(microbatch, {}).values() for each in pending)

    def _compute(self, group: WeightGroup, pending: Sequence[PendingGrad]) -> None:
        totals, views = self._groups[group]
        with torch.no_grad():  # Autocast is off where workers are between forwards.
            group.compute(totals, pending)
        if views:
            del self._groups[group]
            found = [(edge, total.value) for edge, total in views if total.value is not None]
            self._backward([edge for edge, _ in found], [grad for _, grad in found])


class MicrobatchLedger:
    """Puts what the calls of one microbatch leave into its stage's ledger."""

    __slots__ = ("_ledger", "_microbatch", "fills")
    leads = False

    def __init__(self, ledger: Ledger, microbatch: int) -> None:
        self._ledger = ledger
        self._microbatch = microbatch
        self.fills = microbatch not in ledger.fused

    @property
    def gathers(self) -> bool:
        """See MicrobatchStore."""
        return self.fills

    def put(self, group: WeightGroup, ctx: Any, grad: Tensor, phony: Any) -> None:
        """See MicrobatchStore: a layer that differentiates inside its forward leaves nothing."""
        if _will_engine_execute_node(phony):
            # With its node each would hold the graph before it, as far as the stage's input.
            ctx.saved_for_weight = tuple([_apart(x) for x in ctx.saved_for_weight])
            self._ledger.put(self._microbatch, group, PendingGrad(ctx, grad, None))


def _apart(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.grad_fn is None else x.detach()
