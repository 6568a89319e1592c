"""Drop-in: microbatches run through the stages in clock cycles, in a single autograd graph.

    clock   stage 0   stage 1   stage 2           i: microbatch, of m
    0       (0,0)                                 j: stage, of n
    1       (1,0)     (0,1)
    2       (2,0)     (1,1)     (0,2)
    3                 (2,1)     (1,2)
    4                           (2,2)

An early stage continues, without waiting for the clock. After (i, j) has failed, those of cycles up to i + j are still
done. So the error of the earliest cycle is raised, whichever thread was faster.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from splitpipe.compiled import contexts
from splitpipe.core import stream
from splitpipe.core.graph import cross, rank_of
from splitpipe.core.tensors import is_plain
from splitpipe.core.thread_state import unobserved
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.core.transfer import Route, Routes, depart, leave
from splitpipe.core.worker import Pool
from splitpipe.engine.code import CodeForward
from splitpipe.engine.executor import Executor
from splitpipe.engine.forward import MicrobatchForward
from splitpipe.engine.parts import Cutting, Flat, cut
from splitpipe.engine.run import Run
from splitpipe.loss.terms import Number, Unknown
from splitpipe.partition.homes import Homes
from splitpipe.stage.checkpoint import Remade, checkpointed
from splitpipe.training.op_rows import OpRun

#: Values on their way, their route if they are copied, and the event after which they are there.
Sent = tuple[Sequence[Tensor], "Route | None", "torch.Event | None"]


class DropinWork:
    """What the threads of a call do: microbatches that continue to their next border."""

    def __init__(self, run: Run, cutting: Cutting, routes: Routes | None) -> None:
        self._run, self._cutting, self._routes = run, cutting, routes
        self.forwards: list[Any] = []

    def transfer(self, forward: Any) -> GraphTransfer:
        """How a microbatch's values reach later stages."""
        return GraphTransfer(forward, self._routes, self._cutting)

    def finish(self, forward: MicrobatchForward, output: Any) -> Flat:
        """The flat output of a microbatch, and its nesting."""
        return output.leaves, output.spec

    def counting(self, i: int, stage: int) -> None:
        """None: drop-in, nothing is counted."""

    def run(self, threads: Pool, workers: Sequence[int]) -> None:
        """Runs all forwards, in the order of the clock; ``workers``: that of each stage."""
        call, forwards = self._run.call, self.forwards
        # The user's hooks and modes see ops one at a time, in the same order every time.
        one = call.state.observed or self._run.in_turn
        rows = rows_of(len(forwards), [0] * len(workers) if one else workers)
        around = call.state._replace(function_modes=())
        parked, ahead = forwards[0].parked, None if call.state.grad else AHEAD
        Executor(rows, self, around, call.variables, parked=parked, clocked=True, ahead=ahead).run(threads)

    def found(self) -> tuple[list[Flat], list[dict[int, Number | Unknown]]]:
        """The flat outputs, their graphs cut into those of stages, and what numbers among them consist of."""
        forwards, cutting = self.forwards, self._cutting
        found, numbers = [forward.taken() for forward in forwards], [forward.numbers for forward in forwards]
        call = self._run.call
        if call.state.grad and any([stage.compiled for stage in self._run.stages]):
            contexts.part(call.computes, call.leaves, [leaf for leaves, _ in found for leaf in leaves])
        if cutting.known:
            found, numbers = cut(self._run, forwards, found, numbers, cutting.watched, cutting.end())
        return found, numbers

    def rejoin(self) -> None:
        """Makes the caller's streams wait for the stages'."""
        self._run.call.rejoin()

    def whole(self, i: int, pause: Callable[[], None]) -> None:
        """The whole forward of a microbatch."""
        self.forwards[i].whole(pause)

    def forward(self, op: OpRun) -> None:
        """F of a stage."""
        self.forwards[op.microbatches[0]].step(op.stage)

    def begin(self, op: OpRun) -> None:
        """Nothing: values that cross a border are fetched when they are used."""

    end = other = begin

    def failed(self, op: OpRun, error: BaseException) -> None:
        """Nothing: the forward has recorded where."""

    def done(self, complete: bool) -> None:
        """Nothing."""


class CodeDropinWork(DropinWork):
    """The same for any module other than an nn.Sequential."""

    def __init__(self, run: Run, cutting: Cutting, routes: Routes | None, homes: Homes) -> None:
        super().__init__(run, cutting, routes)
        self._homes = homes
        self._events: list[Events] = []

    def transfer(self, forward: Any) -> CodeGraphTransfer:
        """How a microbatch's values reach later stages."""
        self._events.append(Events(self._run.in_turn))
        return CodeGraphTransfer(forward, self._homes, self._routes, self._cutting, self._events[-1])

    def finish(self, forward: Any, output: Any) -> Flat:
        """The flat output of a microbatch, and its nesting."""
        return forward.flat(output)  # type: ignore[no-any-return]

    def rejoin(self) -> None:
        """Makes the caller's streams wait for the stages'."""
        for events in self._events:
            events.spent()
        super().rejoin()


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The (microbatch, stage) pairs of each clock cycle, first stage first."""
    for clock in range(m + n - 1):
        yield [(clock - j, j) for j in range(max(1 + clock - m, 0), min(1 + clock, n))]


def rows_of(microbatches: int, workers: Sequence[int]) -> list[list[OpRun]]:
    """The rows of the workers, in the order of the clock."""
    rows: list[list[OpRun]] = [[] for _ in range(max(workers) + 1)]
    for cycle in clock_cycles(microbatches, len(workers)):
        for i, j in cycle:
            rows[workers[j]].append(OpRun("F", j, (i,)))
    return rows


#: How many microbatches a stage may be ahead of the next one if nothing is kept for backward.
AHEAD = 2


class Events:
    """The ends of a microbatch's segments on their streams: a copy of what one has made waits only for its end.

    If ops run one after another, buffers have values of other microbatches, so a copy waits for everything.
    """

    def __init__(self, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._ends: dict[int, torch.Event | None] = {}

    def mark(self, forward: MicrobatchForward) -> None:
        """Records the end of a segment."""
        if not self._in_turn:
            self._ends[forward.stage] = stream.mark(forward.run.stages[forward.stage].compute)

    def of(self, stage: int) -> torch.Event | None:
        """The end of a segment; None if it hasn't ended or isn't known."""
        return self._ends.get(stage)

    def forget(self) -> None:
        """Makes copies wait for everything from now on."""
        self.spent()
        self._in_turn = True

    def spent(self) -> None:
        """Releases the events, when no more copies will wait for them."""
        for event in self._ends.values():
            stream.spent(event)
        self._ends = {}


class Beside:
    """The streams of a device that has several stages: a later one must wait for what an earlier one has made.

    Values that have no node, or are used by code between blocks, can't be told from the stage's own ones.
    """

    def __init__(self, forward: CodeForward, events: Events) -> None:
        self._forward, self._events = forward, events

    def enter(self) -> None:
        """Begins a segment: its stream waits for the microbatch's earlier ones on other streams of the device."""
        stages, k = self._forward.run.stages, self._forward.stage
        own = stages[k]
        for number, earlier in enumerate(stages[:k]):
            if earlier.device == own.device and not stream.same(earlier.compute, own.compute):
                event = self._events.of(number)
                if event is None:
                    stream.wait(own.compute, earlier.compute)
                else:
                    stream.wait_for(own.compute, event)

    def hold(self, x: Tensor) -> None:
        """Keeps the memory of a tensor that the current stage uses, since another stream may have made it."""
        run, stage = self._forward.run, self._forward.stage
        with DisableTorchFunction():
            if isinstance(x, Parameter):
                run.uses(x, stage)
            stream.hold(x, run.stages[stage].compute)


class GraphTransfer:
    """Passes values to later stages as nodes of the single graph."""

    def __init__(self, forward: MicrobatchForward, routes: Routes | None, cutting: Cutting) -> None:
        self._forward = forward
        self._routes = routes
        self._cutting = cutting

    def opening(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the caller's input, as the first stage gets them."""
        return entered(self._forward, self._cutting, leaves) if self._cutting.known else [*leaves]

    def entering(self) -> None:
        """Nothing: values that arrive are waited for."""

    def leaving(self, forward: MicrobatchForward) -> None:
        """Nothing: values that cross have been sent."""

    def send(self, values: Sequence[Tensor], source: int, target: int, frame: Remade | None) -> Sent:
        """Sends values of the current stage to a later one; ``frame``: if the stage is checkpointed.

        If they aren't copied, the stage's own nodes recompute it as soon as their gradient is there.

        They are copied now: later, a copy would queue on its stream after the waits for other microbatches.
        """
        route = None if self._routes is None else self._routes.of(source, target)
        if route is None:
            return values, None, None
        ready = stream.mark(route.source.compute)
        with torch.set_grad_enabled(self._forward.run.call.state.grad):
            left = [self._left(x, route, ready, frame) for x in values]
            copied, event = route.depart(left)
        stream.spent(ready)
        return copied, route, event

    @staticmethod
    def _left(x: Tensor, route: Route, ready: torch.Event | None, frame: Remade | None) -> Tensor:
        y = leave(x, route.source, route.target, ready) if x.device == route.source.device else x
        if frame is None or y.grad_fn is None:
            return y
        with stream.use(route.source.order):  # In backward, before compute waits for the gradient.
            return checkpointed(y, frame, rank_of(y))

    def take(self, sent: Sent, source: int) -> list[Tensor]:
        """Takes values that were sent, on the current stage."""
        values, route, event = sent
        with torch.set_grad_enabled(self._forward.run.call.state.grad):
            if route is None:
                return [self._crossed(cross(x), x) if self._marks(x) else x for x in values]
            arrived = route.arrive(values, event)
            return [
                self._crossed(y, x) if y is not x else self._crossed(cross(x), x) if self._marks(x) else x
                for x, y in zip(values, arrived)
            ]

    def _marks(self, x: Tensor) -> bool:
        return self._cutting.marked and x.requires_grad

    def _crossed(self, y: Tensor, x: Tensor) -> Tensor:
        """Records that a value, which is ``x`` on its source, has reached the current stage."""
        if self._cutting.marked and y.grad_fn is not None:
            self._forward.crossed[y.grad_fn] = self._forward.stage
            self._forward.odd = self._forward.odd or not is_plain(x)
        return y


class CodeGraphTransfer(GraphTransfer):
    """The same for the values of a module's own code, which it finds by their devices and nodes."""

    def __init__(
        self, forward: CodeForward, homes: Homes, routes: Routes | None, cutting: Cutting, events: Events
    ) -> None:
        super().__init__(forward, routes, cutting)
        self._of, self._homes, self._events = forward, homes, events
        self.writing, self.refuses = cutting.write, not cutting.watched
        self._beside = Beside(forward, events) if forward.run.call.beside else None
        self.using = None if self._beside is None else self._beside.hold

    one_graph = True

    def entering(self) -> None:
        """Begins a segment, after those before it on its device."""
        if self._beside is not None:
            self._beside.enter()

    def leaving(self, forward: MicrobatchForward) -> None:
        """Marks the end of a segment, for which copies of its values wait."""
        if self._routes is not None:
            self._events.mark(forward)

    def differentiates(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Results of a backward in the module's own code come after the ends of its stages' segments."""
        self._events.forget()

    def foreign(self, x: Tensor) -> bool:
        """True for a tensor on another stage's device, or in an earlier stage's part of the graph."""
        forward = self._of
        node = x.grad_fn if self._cutting.known else None
        if node is not None and node._sequence_nr() < forward.firsts[-1]:
            stage = forward.maker(node)
            if stage is not None and stage < forward.stage:
                return True
        return self._homes.several and self._homes.elsewhere(x, forward.stage)

    def maker(self, x: Tensor) -> int:
        """The last stage before this one on the tensor's device."""
        return self._homes.stage_on(x.device, self._of.stage)

    def state(self, x: Tensor) -> Tensor | None:
        """A parameter's copy, whose gradient is returned once, or a buffer's."""
        if not isinstance(x, Parameter) and not self._of.run.is_buffer(x):
            return None
        if self._of.run.adopted(x, self._of.stage):
            return x
        source = self._homes.stage_on(x.device, self._of.stage)
        return self._of.run.copied(x, self._of.stage, lambda x: self.carry(x, source))

    def carry(self, x: Tensor, source: int) -> Tensor:
        """The value for the current stage, after the end of the segment that last used it."""
        route: Route | None = None if self._routes is None else self._routes.of(source, self._forward.stage)
        crossing = route is not None and x.device == route.source.device
        if not crossing and not self._marks(x):
            return x
        with torch.set_grad_enabled(self._forward.run.call.state.grad):
            if crossing:
                assert route is not None
                y = leave(x, route.source, route.target, self._events.of(source))
                y = depart(y, route.source, route.target)
                y = route.arrive([y], stream.mark(route.target.copy))[0]
            else:
                y = cross(x)
        return self._crossed(y, x)


def entered(forward: MicrobatchForward, cutting: Cutting, leaves: Sequence[Any]) -> list[Any]:
    """The leaves of the arguments; those that require grad are outputs of new nodes if their graph may be cut there."""
    own: dict[int, Any] = {}
    with unobserved():  # The mode Follow would bring them to the stage's device.
        for x in leaves:
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in own:
                own[id(x)] = y = cross(x, ranked=False) if cutting.marked else x
                edge = get_gradient_edge(y)
                forward.inputs[edge.node, edge.output_nr] = x
                forward.crossed[edge.node] = 0
    return [own.get(id(x), x) if isinstance(x, Tensor) else x for x in leaves]
