"""Drop-in: the graph's nodes between the layers of one stage and those of the next, for a microbatch.

The graph of microbatch i around stage j, by the stream that each node is created under:

      from stage j-1
    ┌──────┸──────┐
    │    Copy     │  copy, both       [1] to the device of j
    └──────┰──────┘  (the worker of j-1 sends, or the caller's thread, see forward)
    ┌──────┸──────┐  (the worker of j takes, or the caller's thread)
    │    Wait     │  copy into j      [2] compute waits for the copy
    │    Join     │  compute          [3] (i-1, j) goes backward after (i, j)
    │   layers    │  compute          [4]
    │    Leave    │  compute          [5] the copy waits for compute
    │  Recompute  │  order of j       [6] if checkpointed: backward, before [5] has compute wait for the gradient
    │    Fork     │  order of j       [3] for microbatch i+1
    └──────┰──────┘
       to stage j+1

[1] is made by the worker that computed the value, right after it: later, the copy would stand in its stream behind the
waits for later microbatches. [2] is made by the worker that takes the value, when stage j needs it, and waits for the
event of that copy. Made earlier, or with a wait for the whole stream, it would also wait for copies that compute does
not need yet.

Fork and Recompute on the compute stream would make it wait for the gradient's copy, and on the copy stream for the
copies of later microbatches. They rank with the nodes of their stage and microbatch, so that a device is through with
one microbatch before it looks at the next. Between stages of one device and stream there is nothing to copy: [1], [2]
and [5] are left out and the rest is on the compute stream.

Where all are on the CPU, one thread goes backward, and [3] is left out. What leaves (i, j) ranks 1 + i n + j there,
below every other node but a Flush: a microbatch goes backward through a stage after all later stages, and after
all later microbatches. That keeps the fewest gradients and recomputed activations waiting.

Only tensors that require grad get nodes, each its own: a node over several would pass undefined gradients into
the graph of an output that the loss does not use, and fire the hooks of parameters there.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.graph import FIRST, LAST, fork, join, rank, rank_of
from splitpipe.core.mailbox import Mailbox
from splitpipe.core.transfer import Route, Routes, leave
from splitpipe.dropin.node import NodeTask
from splitpipe.stage.again import may_be_plain
from splitpipe.stage.call import Call, Parcel
from splitpipe.stage.checkpoint import checkpointed
from splitpipe.stage.stage import Result, Skips, Stage, Task
from splitpipe.training.node import DropinSink

#: Sent in place of a value that will never be.
LOST = object()
#: The number of values that a stage may be ahead of the next one where nothing is kept for backward.
AHEAD = 2


class Border:
    """One stage's side of the border, in one call. ``mail``: each stage's mailbox; no routes if all are on the CPU."""

    def __init__(self, stage: Stage, call: Call, mail: Sequence[Mailbox], routes: Routes | None) -> None:
        self._stage = stage
        self._index = stage.index
        self._last = stage.index + 1 == len(mail)
        self._count = len(call.rows)
        self._grad = call.state.grad
        self._mail = mail
        self._own = mail[stage.index]
        self._routes = routes
        self._arriving = stage.own.arriving
        self._leaving = stage.own.leaving
        self._ordered = call.state.grad and routes is not None
        self._ranked = call.state.grad and routes is None
        self._phony: Tensor | None = None  # The phony of the microbatch before.
        self.outputs: dict[int, Parcel] = {}

    def take(self, i: int) -> tuple[Parcel, Skips] | None:
        """[2] and [3]: what the stage is given, once it is there; None if something is lost."""
        j, own = self._index, self._own
        messages = [own.take((j, i)), *(own.take((key, i)) for key in self._arriving)]
        if not self._grad:
            if j:
                self._mail[j - 1].put(("credit", j - 1, i), None)
            if not self._last and i >= AHEAD:
                own.take(("credit", j, i - AHEAD))
        if LOST in messages:
            return None
        value, *skips = map(_arrived, messages)
        assert value is not None
        if self._ordered:
            self._join(value)
        return value, {key: skip for key, skip in zip(self._arriving, skips) if skip is not None}

    def give(self, i: int, result: Result) -> None:
        """[5], [6], [3] and [1]: sends what the stage has made."""
        value = self._outgoing(i, result, result.value, self._index + 1)
        if self._ordered and i + 1 < self._count:
            self._fork(value)
        if self._last:
            self.outputs[i] = value
        else:
            self._send(self._index + 1, (self._index + 1, i), value)
        for key, target in self._leaving:
            # A layer that does not stash what it said is found out by the one that pops it.
            skip = result.skips.get(key)
            self._send(target, (key, i), None if skip is None else self._outgoing(i, result, skip, target))

    def lose(self, i: int) -> None:
        """Says that the stage will make nothing of a microbatch."""
        if not self._last:
            self._mail[self._index + 1].put((self._index + 1, i), LOST)
        for key, target in self._leaving:
            self._mail[target].put((key, i), LOST)

    def _route(self, target: int) -> Route | None:
        # The last stage's outputs are the caller's.
        return None if self._routes is None or target == len(self._mail) else self._routes.of(self._index, target)

    def _send(self, target: int, key: Any, parcel: Parcel | None) -> None:
        route, event = self._route(target), None
        if route is not None and parcel is not None:
            leaves, event = route.depart(parcel.leaves)
            parcel = parcel.holding(leaves)
        self._mail[target].put(key, (parcel, route, event))

    def _outgoing(self, i: int, result: Result, parcel: Parcel, target: int) -> Parcel:
        route, frame = self._route(target), result.frame
        if route is None and frame is None and not self._ranked:
            return parcel

        def through(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = LAST + 1 + i * len(self._mail) + self._index if self._ranked else rank_of(leaf)
            if route is not None and leaf.device == route.source.device:
                leaf = leave(leaf, route.source, route.target)
            if frame is not None and leaf.grad_fn is not None:
                with stream.use(self._stage.compute if route is None else route.source.order):
                    leaf = checkpointed(leaf, frame, made)
            elif self._ranked and leaf.grad_fn is not None:
                rank(leaf, made)
            return leaf

        return parcel.holding([through(leaf) for leaf in parcel.leaves])

    def _fork(self, value: Parcel) -> None:
        numbers = value.differentiable
        # With several the loss may use any of them, and an edge to one it does not use would bring it undefined
        # gradients. Their order is that of the sequence numbers.
        if len(numbers) != 1:
            return
        made, route = value.leaves[numbers[0]], self._route(self._index + 1)
        with stream.use(self._stage.compute if route is None else route.source.order):
            forked, self._phony = fork(made)
            rank(forked, rank_of(made))
        value.leaves[numbers[0]] = forked

    def _join(self, value: Parcel) -> None:
        phony, self._phony = self._phony, None
        numbers = value.differentiable
        if phony is None or not numbers:
            return
        with stream.use(self._stage.compute):
            joined = join(value.leaves[numbers[0]], phony)
            rank(joined, FIRST)
        value.leaves[numbers[0]] = joined


class LayersWork:
    """The work of an nn.Sequential's stages: runs of their layers, and the borders between them."""

    def __init__(
        self, call: Call, stages: Sequence[Stage], routes: Routes | None, sinks: Sequence[DropinSink | None]
    ) -> None:
        self._call = call
        self._stages = stages
        self._routes = routes
        self._sinks = sinks

    def inputs(self) -> list[tuple[Parcel, None, None]]:
        """The microbatches of the input."""
        call = self._call
        return [(parcel, None, None) for parcel in call.cut(call.input, 0)]

    def borders(self, mail: Sequence[Mailbox]) -> list[Border]:
        """The border of each stage."""
        return [Border(stage, self._call, mail, self._routes) for stage in self._stages]

    def task(self, i: int, j: int, given: tuple[Parcel, Skips], inside: bool = False) -> Task:
        """A run of a stage's layers."""
        call, stage, sink, state = self._call, self._stages[j], self._sinks[j], self._call.state
        # The user's function modes are entered for the layers alone.
        inside = inside and not state.function_modes
        if sink is None or i < call.checkpointed and not may_be_plain(stage):
            return Task(stage, call, i, *given, state, inside=inside)
        return NodeTask(stage, sink, call, i, *given, state, inside=inside)


def _arrived(message: tuple[Parcel | None, Route | None, torch.Event | None]) -> Parcel | None:
    parcel, route, event = message
    if parcel is None or route is None:
        return parcel
    return parcel.holding(route.arrive(parcel.leaves, event))
