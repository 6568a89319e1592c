"""Drop-in, where a block has a graph of its own: its weight gradients come back into autograd by one Flush.

     parameters of the block ─> AccumulateGrad
       ^
     LeafFlush            the block's gradients, once every B that leads to them is done
       ^ phony, one edge a microbatch
     BlockNode(i)         backward: B of one microbatch, by autograd's engine in the block's own graph

What B computes itself is summed in the stash of the graph task; what it leaves for W is computed here at the latest.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core import stream
from splitpipe.core.torch_private import queue_callback
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.function import WeightGradients
from splitpipe.deferral.owners import Owner, Weight, edge_of
from splitpipe.deferral.pending import Node, PendingGrad, WeightGroup, without_graph
from splitpipe.deferral.stash import Stash, Stashes
from splitpipe.deferral.streams import BackwardStreams

#: Bytes that the nodes of a microbatch may keep at most until B is through with all of them.
_MUCH = 2**22
#: Goes backward from edges, given the gradients, to leaves, and adds to the sums of these.
Backward = Callable[[Sums, Sequence[GradientEdge], Sequence[Tensor], Sequence[Tensor]], None]


class Goal(NamedTuple):
    """Where the gradient of a weight goes: to a leaf, or to the edge of a view of it; ``turned``: transposed."""

    leaf: Tensor
    edge: GradientEdge | None
    turned: bool


class LeafStashes(Stashes):
    """The stashes of one stage in one call of the model, and the groups of its weights; see Stashes."""

    def __init__(
        self, streams: BackwardStreams, limit: int | None, names: Mapping[int, str], backward: Backward
    ) -> None:
        super().__init__(streams, limit)
        self.backward = backward
        self.goals: dict[WeightGroup, list[Goal | None]] = {}
        self._names = names
        self._known: dict[object, WeightGroup] = {}

    def known(self, key: object) -> WeightGroup | None:
        """A group that other microbatches have, too."""
        return self._known.get(key)

    def make(self, key: object | None, function: WeightGradients, weights: Sequence[Weight | None]) -> WeightGroup:
        """A group for W; without a key for one microbatch. A weight is None if it needs no gradient, or has it of B."""
        leaves = [None if weight is None else weight.leaf for weight in weights]
        kinds = [None if weight is None else weight.kind for weight in weights]
        group = WeightGroup.of(function, leaves, kinds, self._names)
        self.goals[group] = [
            None if weight is None
            else Goal(weight.leaf, None if weight.edge is None else edge_of(weight), weight.turned)
            for weight in weights
        ]
        if key is not None:
            self._known[key] = group
        return group

    def open(self) -> LeafStash:
        """The stash of the running graph task."""
        found = super().open()
        assert isinstance(found, LeafStash)
        return found

    def made(self) -> LeafStash:
        """A new one."""
        return LeafStash(self)


class LeafStash(Stash):
    """What the backwards of one graph task have computed, and what they have left for W."""

    def __init__(self, stashes: LeafStashes) -> None:
        super().__init__(stashes.streams, stashes.limit)
        self._goals, self._backward = stashes.goals, stashes.backward
        #: Of leaves, as far as they are computed.
        self.sums = Sums()

    def early(
        self, owners: Sequence[Owner], kept: Sequence[PendingGrad]
    ) -> Callable[[WeightGroup, PendingGrad], None] | None:
        """Who takes what nodes leave as it comes; None if it may wait for B's end, as it is little, or as the sums."""
        size = 2 * sum([new.size for new in kept])  # With the gradients that they will be given.
        if self._grants:
            size -= sum({owner.group: owner.group.size for owner in owners}.values())
        return self._at_once if size > min(self._limit, _MUCH) else None

    def _at_once(self, group: WeightGroup, new: PendingGrad) -> None:
        with torch.no_grad():
            self.leave([(group, new)], True)

    def leave(self, left: Sequence[tuple[WeightGroup, PendingGrad]], now: bool) -> None:
        """Takes what the nodes of a graph have left in B; ``now``: computes it at once, unless what waits is free."""
        streams = self._streams
        for _, new in left:
            new.ctx.saved_for_weight = without_graph(new.ctx.saved_for_weight)
        if streams.side is not None and left:
            for x in [x for _, new in left for x in new.tensors()]:  # A layer may have made it on a stream of its own.
                stream.hold(x, streams.compute)
            stream.wait(streams.side, streams.compute)
        groups = {group: self._added(group, new) for group, new in left}
        if now:
            self._compute_early({group: found for group, found in groups.items() if found.size > 0})
        self._shrink()

    def gradients(self, leaves: Sequence[Tensor]) -> list[Total | None]:
        """The sums of leaves, which are let go of. Called on the side stream."""
        wanted = {*map(id, leaves)}
        goals: list[tuple[Goal, Total]] = []
        with torch.no_grad():
            for group in [each for each in self._groups if not wanted.isdisjoint(map(id, each.parameters))]:
                totals = self.flush(group)
                goals += [
                    (goal, total) for goal, total in zip(self._goals[group], totals)
                    if goal is not None and total is not None and total.value is not None
                ]
            stream.wait(self._streams.side, self._streams.compute)  # B has added to sums.
            for goal, total in goals:
                if goal.edge is None:
                    self.sums.of(goal.leaf).join(total)
        self._go_on([(goal, total) for goal, total in goals if goal.edge is not None])
        return [self.sums.take(leaf) for leaf in leaves]

    def _go_on(self, goals: Sequence[tuple[Goal, Total]]) -> None:
        """The sums of views go on to their leaves."""
        if not goals:
            return
        edges = [goal.edge for goal, _ in goals if goal.edge is not None]
        grads = [total.value.t() if goal.turned else total.value for goal, total in goals if total.value is not None]
        leaves = {id(goal.leaf): goal.leaf for goal, _ in goals}
        self._backward(self.sums, edges, grads, [*leaves.values()])
        del grads
        for goal, total in goals:
            self.sums.of(goal.leaf).take_over(total)


class LeafFlush(Node):
    """A phony; in backward, the gradients of some leaves."""

    @staticmethod
    def forward(ctx: Any, stashes: LeafStashes, leaves: Sequence[Tensor], *weights: Tensor) -> Tensor:
        """The phony; ``weights``: the leaves, or views of them."""
        ctx.set_materialize_grads(False)
        ctx.stashes, ctx.leaves = stashes, leaves
        return torch.empty(0, device=stashes.streams.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        stash = ctx.stashes.find()
        found: list[Total | None] = [None] * len(ctx.leaves) if stash is None else stash.gradients(ctx.leaves)
        for leaf, total in zip(ctx.leaves, found):
            if total is None and leaf._backward_hooks:  # Behind an output that the loss does not use.
                _for_gradients_alone(leaf._backward_hooks)
        return None, None, *[None if total is None else total.value for total in found]


class _Given:
    """A hook that is called with a gradient alone, and not where there is none."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Any:
        return None if grad is None else self.hook(grad)


def _for_gradients_alone(hooks: dict[int, Any]) -> None:
    """Replaces a leaf's hooks until the running graph task is over."""
    for key, hook in list(hooks.items()):
        if not isinstance(hook, _Given):
            hooks[key] = given = _Given(hook)
            queue_callback(partial(_put_back, hooks, key, given))


def _put_back(hooks: dict[int, Any], key: int, given: _Given) -> None:
    if hooks.get(key) is given:  # Else its handle has removed it.
        hooks[key] = given.hook
