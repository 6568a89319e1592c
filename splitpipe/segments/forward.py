"""Drop-in: microbatches walk through the stages in clock cycles, and one autograd graph is laid down behind them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from splitpipe.core import stream
from splitpipe.core.graph import cross
from splitpipe.core.tensors import is_plain
from splitpipe.core.thread_state import unobserved
from splitpipe.core.transfer import Route, Routes, depart, leave
from splitpipe.dropin.forward import clock_cycles
from splitpipe.loss.tracing import numbers_of
from splitpipe.segments import outputs
from splitpipe.segments.homes import Homes
from splitpipe.segments.parts import Cutting
from splitpipe.segments.walk import Walk
from splitpipe.training.executor import OpRun


class DropinWork:
    """The work of a call's threads: microbatches that go on to their next border."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self._walks = walks

    def walk(self, i: int) -> None:
        """The whole forward of a microbatch."""
        self._walks[i].walk()

    def begin(self, op: OpRun) -> None:
        """Nothing: what crosses a border is fetched by whoever uses it."""

    end = other = begin

    def failed(self, op: OpRun, error: BaseException) -> None:
        """Nothing: the walk has noted where."""

    def done(self, complete: bool) -> None:
        """Nothing."""


def rows_of(microbatches: int, workers: Sequence[int]) -> list[list[OpRun]]:
    """The rows of the workers, in the order of the clock."""
    rows: list[list[OpRun]] = [[] for _ in range(max(workers) + 1)]
    for cycle in clock_cycles(microbatches, len(workers)):
        for i, j in cycle:
            rows[workers[j]].append(OpRun("F", j, (i,)))
    return rows


class Events:
    """The ends of a microbatch's segments on their streams: a copy of what one has made waits for that alone.

    Where ops come one after another, buffers have values of other microbatches: a copy waits for all that there is.
    """

    def __init__(self, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._ends: dict[int, torch.Event | None] = {}

    def mark(self, walk: Walk) -> None:
        """A segment has ended."""
        if not self._in_turn:
            self._ends[walk.stage] = stream.mark(walk.run.stages[walk.stage].compute)

    def of(self, stage: int) -> torch.Event | None:
        """The end of a segment; None if it has not ended, or none is known."""
        return self._ends.get(stage)

    def forget(self) -> None:
        """Has copies wait for all that there is, from now on."""
        self.spent()
        self._in_turn = True

    def spent(self) -> None:
        """Gives the events back: no copy will wait for them any more."""
        for event in self._ends.values():
            stream.spent(event)
        self._ends = {}


class Laying:
    """Copies values to the devices of later stages, as nodes of the one graph."""

    def __init__(self, walk: Walk, homes: Homes, routes: Routes | None, events: Events, cutting: Cutting) -> None:
        self._walk = walk
        self._cutting = cutting
        self.writing, self.refuses = cutting.write, not cutting.watched
        self._homes = homes
        self._routes = routes
        self._events = events

    one_graph = True

    def differentiates(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """What a backward of the module's own gives comes after the ends of its stages' segments."""
        self._events.forget()

    def foreign(self, x: Tensor) -> bool:
        """True for a tensor on the device of another stage, or of an earlier one's part of the graph."""
        walk = self._walk
        node = x.grad_fn if self._cutting.known else None
        if node is not None and node._sequence_nr() < walk.firsts[-1]:
            stage = walk.maker(node)
            if stage is not None and stage < walk.stage:
                return True
        return self._homes.elsewhere(x, walk.stage)

    def maker(self, x: Tensor) -> int:
        """The last stage before this one on the tensor's device."""
        return self._homes.stage_on(x.device, self._walk.stage)

    def state(self, x: Tensor) -> Tensor | None:
        """A parameter's copy, whose gradient goes home once, or a buffer's."""
        if not isinstance(x, Parameter) and not self._walk.run.is_buffer(x):
            return None
        if self._walk.run.adopted(x, self._walk.stage):
            return x
        source = self._homes.stage_on(x.device, self._walk.stage)
        return self._walk.run.copied(x, self._walk.stage, lambda x: self.carry(x, source))

    def carry(self, x: Tensor, source: int) -> Tensor:
        """The value on the present stage's device, after the end of the segment that it was last used in."""
        route: Route | None = None if self._routes is None else self._routes.of(source, self._walk.stage)
        crossing = route is not None and x.device == route.source.device
        if not crossing and not (self._cutting.marked and x.requires_grad):
            return x
        with torch.set_grad_enabled(self._walk.run.call.state.grad):
            if crossing:
                assert route is not None
                y = leave(x, route.source, route.target, self._events.of(source))
                y = depart(y, route.source, route.target)
                y = route.arrive([y], stream.mark(route.target.copy))[0]
            else:
                y = cross(x)
        if self._cutting.marked and y.grad_fn is not None:
            self._walk.crossed[y.grad_fn] = self._walk.stage
            self._walk.odd = self._walk.odd or not is_plain(x)
        return y


def entered(walk: Walk, cutting: Cutting, leaves: Sequence[Any]) -> list[Any]:
    """The leaves of the arguments; those that require grad by nodes of their own, if their graph is to be cut there."""
    own: dict[int, Any] = {}
    with unobserved():  # Follow would bring them to the stage's device.
        for x in leaves:
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in own:
                own[id(x)] = y = cross(x, ranked=False) if cutting.marked else x
                edge = get_gradient_edge(y)
                walk.inputs[edge.node, edge.output_nr] = x
                walk.crossed[edge.node] = 0
    return [own.get(id(x), x) if isinstance(x, Tensor) else x for x in leaves]


def flat(walk: Walk, output: Any) -> tuple[list[Any], Any]:
    """A microbatch's output, taken apart, with its tensors where they were last."""
    leaves, nesting = outputs.flatten(output)
    made = numbers_of(walk.trace, leaves)
    leaves = [walk.values.latest(x) if isinstance(x, Tensor) else x for x in leaves]
    walk.numbers = {id(leaves[k]): number for k, number in made.items()}
    if walk.run.ranked:
        walk.rank(leaves)
    return leaves, nesting
