"""Drop-in: a microbatch on a stage of an nn.Sequential as one node of the graph around it.

Its own graph is that of its run; if it is checkpointed, one that is made in backward.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import kinds_of, pairs_of, reached, unleaf
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.stage.again import Made
from splitpipe.stage.call import Call, Parcel
from splitpipe.stage.stage import Again, Result, Skips, Stage, Task
from splitpipe.training.held import StageInputs
from splitpipe.training.node import DropinSink, Dropped, may_be_made_again, outputs_of


class NodeTask(Task):
    """A microbatch on a stage; it stays in the graph around it if it can't have one by itself."""

    graphs = True

    def __init__(
        self, stage: Stage, sink: DropinSink, call: Call, i: int, value: Parcel, skips: Skips, state: State,
        inside: bool = False,
    ) -> None:
        super().__init__(stage, call, i, value, skips, state, inside)
        self._sink = sink

    def __call__(self) -> Result:
        if self.checkpoint:
            return self._dropped()
        return super().__call__() if self.stage.facts.apart is False else self._held()

    def _held(self) -> Result:
        stage = self.stage
        every, parcels = stage.own.every, [self.value, *self.skips.values()]
        with stream.use(stage.compute):
            with torch.enable_grad():
                # Before the run: a layer with a stream of its own would be the first to ask for its weights' nodes.
                self._sink.phony(stage, every)
                inputs = StageInputs(stage.facts, self._sink, [x for each in parcels for x in each.leaves])
            given = iter(inputs.leaves)
            value, *skips = [parcel.holding([next(given) for _ in parcel.leaves]) for parcel in parcels]
            self.value, self.skips = value, dict(zip(self.skips, skips))
            result = super().__call__()
            made = [x for parcel in (result.value, *result.skips.values()) for x in parcel.leaves]
            with torch.enable_grad():
                place = stage.own.place.device
                return _holding(result, inputs.outputs(self.number[0], stage, every, made, str(stage), place))

    def _dropped(self) -> Result:
        outer: dict[int, tuple[Tensor, Tensor]] = {}
        stage, sink, facts = self.stage, self._sink, self.stage.facts
        every = stage.own.every

        def entered(parcel: Parcel) -> Parcel:
            for k in parcel.differentiable:
                x = parcel.leaves[k]
                if id(x) not in outer:
                    outer[id(x)] = x, unleaf(x)
            return parcel.holding([outer[id(x)][1] if id(x) in outer else x for x in parcel.leaves])

        with stream.use(stage.compute), torch.enable_grad():
            self.value, self.skips = entered(self.value), {key: entered(skip) for key, skip in self.skips.items()}
            # Before the run: a layer with a stream of its own would be the first to ask for its weights' nodes.
            phony, ids = sink.phony(stage, every)
        edges = [get_gradient_edge(inner) for _, inner in outer.values()]
        given = [x for parcel in (self.value, *self.skips.values()) for x in parcel.leaves]
        result = super().__call__()
        parcels = [result.value, *result.skips.values()]
        made = [x for parcel in parcels for x in parcel.leaves]
        # An input that a layer has written to is another value.
        own = {id(y): x for (x, y), edge in zip(outer.values(), edges) if y.grad_fn is edge.node}
        inputs = [x for x, _ in outer.values()]
        roots, ends = pairs_of(_roots(made)), {*pairs_of(edges)}
        if facts.plain is None:
            facts.plain = may_be_made_again(made, given, stage.own.place.device, ends)
        if result.again is None or not facts.plain:
            return Result(result.value, result.skips, None)
        known = {id(x) for x in every}
        others = [x for x in reached(roots, ends).leaves if id(x) not in known and x.requires_grad]
        again, kinds, where, i = partial(_made_again, result.again), kinds_of(roots, ends), str(stage), self.number[0]
        flights: list[Dropped] = []

        def flight(places: list[tuple[int, Any]]) -> Dropped:
            flights.append(Dropped(again, sink, i, ids, places, kinds, where, others))
            return flights[0]

        with stream.use(stage.compute), torch.enable_grad():
            if others:
                phony, ids = sink.phony((stage, *map(id, others)), [*every, *others])
            leaves = outputs_of(made, own, flight, phony, inputs)
        return _holding(result, leaves, flights[0] if flights else None)


def _holding(result: Result, leaves: Sequence[Any], flight: Dropped | None = None) -> Result:
    """The result with other leaves."""
    given = iter(leaves)
    value, *skips = [
        parcel.holding([next(given) for _ in parcel.leaves]) for parcel in (result.value, *result.skips.values())
    ]
    return Result(value, dict(zip(result.skips, skips)), flight)


def _made_again(run: Again) -> Made:
    first = _get_sequence_nr()
    entered, out, skips = run()
    numbers = range(first, _get_sequence_nr())
    made = [x for parcel in (out, *skips.values()) for x in parcel.leaves]
    return Made(entered, made, numbers, kinds_of(pairs_of(_roots(made)), {*pairs_of(entered)}))


def _roots(made: Sequence[Any]) -> list[GradientEdge]:
    return [get_gradient_edge(x) for x in made if isinstance(x, Tensor) and x.requires_grad]
