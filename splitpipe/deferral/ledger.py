"""Scheduled: what B leaves for W where a schedule says when each is to run.

    B of a microbatch    leaves a pending gradient for each call of a split function
    W of a microbatch    computes them, adds them to the stage's sums, and frees them

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
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.pending import PendingGrad, WeightGroup
from splitpipe.deferral.streams import BackwardStreams

#: Goes backward from some tensors, or their edges, given the gradients.
Backward = Callable[[Sequence[Any], Sequence[Tensor]], None]
Pending = dict[WeightGroup, list[PendingGrad]]


class GroupSums(NamedTuple):
    """The sums of a group's gradients, and the edges of those weights that are views, each with its sum."""

    totals: list[Total | None]
    views: list[tuple[GradientEdge, Total]]


class Ledger:
    """The pending gradients of one stage, by microbatch, until their W: a PendingStore.

    Args:
        sums: of the stage.
        streams: of the stage.
        fused: microbatches whose weight gradients are computed right after the input gradient of each layer: BW.
        backward: computes the gradients of parameters from the gradients of their views.
    """

    reaches_weights = False

    def __init__(self, sums: Sums, streams: BackwardStreams, fused: Collection[int], backward: Backward) -> None:
        self._sums = sums
        self._backward = backward
        self._streams = streams
        self._fused = fused
        self._phony: Tensor | None = None
        #: The edge to the phony's node, which all calls have; None if no function was called.
        self.phony_edge: GradientEdge | None = None
        self._groups: dict[WeightGroup, GroupSums] = {}
        self._pending: dict[int, Pending] = {}  # By microbatch.
        self._closed = False

    def gains(self, microbatch: int) -> tuple[bool, bool]:
        """W of its own fills idle time, and may be of several microbatches; that in BW is neither."""
        split = microbatch not in self._fused
        return split, split

    def phony(self, group: WeightGroup, weights: Sequence[Tensor]) -> Tensor:
        """The phony of all groups, which leads nowhere."""
        totals = [self._sums.of(weight) if weight.is_leaf else Total(weight.dtype, weight.shape) for weight in weights]
        views = [(get_gradient_edge(x), total) for x, total in zip(weights, totals) if not x.is_leaf]
        given = iter(totals)
        self._groups[group] = GroupSums([None if kind is None else next(given) for kind in group.kinds], views)
        if self._phony is None:
            self._phony = unleaf(torch.empty(0, device=self._streams.device, requires_grad=True))
            self.phony_edge = get_gradient_edge(self._phony)
        return self._phony

    def put(self, group: WeightGroup, ctx: Any, grad: Tensor | None, microbatch: int, now: bool) -> None:
        """Takes what a call has left, until the op that the schedule says, whoever wants it ``now``."""
        if self._closed:
            raise RuntimeError(
                f"a gradient of {group} arrived after its scheduled step, and nobody would compute it: something went "
                "backward through a tensor from inside the step. Expected every term of the loss in "
                "loss_fn(output, target); or backward='autograd', if it leads to the weights of its own stage alone."
            )
        # With its node each would hold the graph before it, as far as the stage's input.
        ctx.saved_for_weight = tuple([
            x if x is None or x.grad_fn is None else x.detach() for x in ctx.saved_for_weight
        ])
        new = PendingGrad(ctx, grad, None)
        elsewhere = self._streams.on_other_stream
        if elsewhere:
            self._streams.join(new.tensors())
        # Views wait for W: their gradients take a backward, and one is running in B.
        if microbatch in self._fused and not self._groups[group].views:
            with stream.use(self._streams.compute) if elsewhere else nullcontext():
                self._compute(group, [new])
        else:
            self._pending.setdefault(microbatch, {}).setdefault(group, []).append(new)

    def make_room(self) -> None:
        """Nothing, since the schedule makes room."""

    def backward_weight(self, microbatches: Sequence[int]) -> None:
        """W: computes and frees what some microbatches have left, for equal weights together."""
        found: Pending = {}
        for microbatch in microbatches:
            for group, pending in self._pending.pop(microbatch, {}).items():
                found.setdefault(group, []).extend(pending)
        while found:
            group = next(iter(found))
            self._compute(group, found.pop(group))

    def close(self) -> None:
        """There is no W any more."""
        self._closed = True

    def size(self, microbatch: int) -> int:
        """Bytes that the pending gradients of a microbatch keep."""
        return sum(each.size for pending in self._pending.get(microbatch, {}).values() for each in pending)

    def _compute(self, group: WeightGroup, pending: Sequence[PendingGrad]) -> None:
        totals, views = self._groups[group]
        with torch.no_grad():  # Autocast is off where workers are between forwards.
            group.compute(totals, pending)
        if views:
            del self._groups[group]
            found = [(edge, total.value) for edge, total in views if total.value is not None]
            self._backward([edge for edge, _ in found], [grad for _, grad in found])
