"""Scheduled: what B leaves for W if a schedule decides when each runs.

    B of a microbatch    leaves a pending gradient for each node that owns a weight
    W of a microbatch    computes them, adds them to the stage's sums, and frees them

A ledger belongs to one stage in one call of the model.

Guarantee: only one thread at a time touches a ledger and its sums. F, B and W of a stage run in its worker, or in an
autograd thread while that worker waits for it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core import stream
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.function import WeightGradients
from splitpipe.deferral.owners import Way, Weight, edge_of
from splitpipe.deferral.pending import PendingGrad, WeightGroup, without_graph
from splitpipe.deferral.streams import BackwardStreams

#: Runs backward from tensors or edges, with their gradients, to some leaves; without any, to all.
Backward = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor]], None]
Pending = dict[WeightGroup, list[PendingGrad]]
#: Bytes of sums that one call of autograd passes on to their leaves.
_TOGETHER = 2**26


class View(NamedTuple):
    """A weight that is a view or a cast of a leaf: its edge, and its sum; ``turned``: the sum is transposed."""

    edge: GradientEdge
    total: Total
    turned: bool = False
    leaf: Tensor | None = None


class GroupSums(NamedTuple):
    """The sums of a group's gradients, and the weights that are views.

    ``alike``: whether another microbatch's edges are equivalent. If so, the sums run through them once, at the end.
    """

    totals: list[Total | None]
    views: list[View]
    alike: bool = False


class Ledger:
    """The pending gradients of one stage, by microbatch, until their W: a PendingStore.

    Args:
        sums: those of the stage.
        streams: those of the stage.
        fused: the microbatches whose weight gradients are computed in B, as BW.
        backward: computes the gradients of parameters from the gradients of their views.
        names: those of the stage's parameters, by identity.
        splits_any: whether any microbatch has a separate W.
    """

    def __init__(
        self, sums: Sums, streams: BackwardStreams, fused: Collection[int], backward: Backward,
        names: Mapping[int, str] = MappingProxyType({}), splits_any: bool = True,
    ) -> None:
        self._sums = sums
        self._names = names
        self._backward = backward
        self._streams = streams
        self._fused = fused
        #: True if any microbatch has a separate W.
        self.splits_any = splits_any
        self._groups: dict[WeightGroup, GroupSums] = {}
        self._pending: dict[int, Pending] = {}  # By microbatch.
        self.ways: dict[Any, Way] = {}
        self._alike: dict[object, WeightGroup] = {}  # Groups that microbatches share.

    def splits(self, microbatch: int) -> bool:
        """True if a microbatch has a separate W."""
        return microbatch not in self._fused

    def gains(self, microbatch: int) -> tuple[bool, bool]:
        """A separate W fills idle time, and may be of several microbatches; neither is true of BW."""
        split = self.splits(microbatch)
        return split, split

    def known(self, key: object) -> WeightGroup | None:
        """A group that other microbatches use too."""
        return self._alike.get(key)

    def make(self, key: object | None, function: WeightGradients, weights: Sequence[Weight | None]) -> WeightGroup:
        """A group for W; without a key, for one microbatch. A weight is None if W has no gradient to compute for it."""
        leaves = [None if weight is None else weight.leaf for weight in weights]
        kinds = [None if weight is None else weight.kind for weight in weights]
        group = WeightGroup(function, leaves, kinds, self._names)
        totals = [None if weight is None else self._total(weight) for weight in weights]
        views = [
            View(edge_of(weight), total, weight.turned, weight.leaf) for weight, total in zip(weights, totals)
            if weight is not None and total is not None and weight.edge is not None
        ]
        self._groups[group] = GroupSums(totals, views, key is not None)
        if key is not None:
            self._alike[key] = group
        return group

    def leave(self, group: WeightGroup, new: PendingGrad, microbatch: int) -> None:
        """Takes what a node of a microbatch's graph has left in B."""
        # With their nodes, saved tensors would keep the graph before them alive, up to the stage's input.
        new.ctx.saved_for_weight = without_graph(new.ctx.saved_for_weight)
        compute = self._streams.compute
        if compute is not None:  # A layer may have made it on a different stream.
            for x in new.tensors():
                stream.hold(x, compute)
        pending = self._pending.setdefault(microbatch, {})
        if group in pending:
            pending[group].append(new)
        else:
            pending[group] = [new]

    def _total(self, weight: Weight) -> Total:
        return self._sums.of(weight.leaf) if weight.edge is None else Total(*weight.kind)

    def settle(self) -> None:
        """At the end, passes the sums of views on to their leaves."""
        views = [view for group in self._alike.values() for view in self._groups.pop(group).views]
        self._alike.clear()
        self.ways.clear()
        while views:
            some, size = [], 0
            while views and size < _TOGETHER:
                some.append(views.pop())
                value = some[-1].total.value
                size += 0 if value is None else value.nbytes
            self._go_on(some)

    def _go_on(self, views: Sequence[View]) -> None:
        """Passes the sums of views on to their leaves."""
        found = [(view, view.total.value) for view in views if view.total.value is not None]
        grads = [value.t() if view.turned else value for view, value in found]
        # Each leaf once: the engine returns its whole gradient each time it is listed.
        leaves = {id(view.leaf): view.leaf for view, _ in found if view.leaf is not None}
        self._backward([view.edge for view, _ in found], grads, [*leaves.values()])
        for view, _ in found:
            if view.leaf is not None:
                self._sums.of(view.leaf).take_over(view.total)

    def make_room(self) -> None:
        """Nothing, since the schedule determines when memory is freed."""

    def backward_weight(self, microbatches: Sequence[int]) -> None:
        """W: computes and frees what some microbatches have left, for equal weights together."""
        first, *others = [self._pending.pop(microbatch, {}) for microbatch in microbatches]
        for more in others:
            for group, pending in more.items():
                first.setdefault(group, []).extend(pending)
        if not first:
            return
        with torch.no_grad():  # Autocast is off in workers between forwards.
            for group in list(first):
                self._compute(group, first.pop(group))

    def size(self, microbatch: int) -> int:
        """Bytes that the pending gradients of a microbatch keep alive."""
        return sum(each.size for pending in self._pending.get(microbatch, {}).values() for each in pending)

    def _compute(self, group: WeightGroup, pending: Sequence[PendingGrad]) -> None:
        found = self._groups[group]
        group.compute(found.totals, pending)
        if found.views and not found.alike:
            del self._groups[group]
            self._go_on(found.views)
