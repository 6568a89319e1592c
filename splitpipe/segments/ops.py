"""Scheduled: F, B and W of a microbatch's segments, each segment with a graph of its own.

    F    the microbatch's forward goes on: a value of an earlier stage enters where the module's code uses it
    B    gradients of what later stages have taken ──> autograd ──> gradients of what has entered, to where that is from

Which values cross is known when they are used. A stage's B runs after those of all later stages, as each sends a word
to the one before, be there gradients or none: then nobody will take more of it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from splitpipe.core import stream
from splitpipe.core.graph import Enter, reached, unleaf
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.core.transfer import Routes
from splitpipe.deferral.accumulator import Sums
from splitpipe.segments.forward import Events
from splitpipe.segments.homes import Homes
from splitpipe.segments.stages import SegmentStage
from splitpipe.segments.values import differentiated
from splitpipe.segments.walk import Walk
from splitpipe.skip.box import Key
from splitpipe.training.capture import Capture, Grads, Graph
from splitpipe.training.ledger import Ledger
from splitpipe.training.node import Ids
from splitpipe.training.ops import Shared, StageOps
from splitpipe.training.record import StageTrace

_ENTER: Any = Enter._backward_cls


@dataclass
class Flight:
    """What a segment's graph is bounded by, from its F to its B."""

    #: The edges by which later stages took values of this one, by stage.
    taken: dict[int, list[GradientEdge]] = field(default_factory=dict)
    #: The edges by which values of earlier stages entered, by stage; the caller's input and target.
    entered: dict[int | Key | None, list[GradientEdge]] = field(default_factory=dict)
    #: The loss, in the last stage.
    value: list[GradientEdge] = field(default_factory=list)
    numbers: range = range(0)


class Detaching:
    """Takes values to later stages outside of autograd; ``flights`` has their edges, by stage."""

    def __init__(
        self, walk: Walk, homes: Homes, routes: Routes | None, events: Events, traces: Sequence[StageTrace]
    ) -> None:
        self._walk = walk
        self._homes = homes
        self._routes = routes
        self._events = events
        self._traces = traces
        self.flights = [Flight() for _ in walk.run.stages]

    def leaving(self, walk: Walk) -> None:
        """A segment has ended."""
        self.flights[walk.stage].numbers = range(walk.firsts[-1], _get_sequence_nr())
        if self._routes is not None:
            self._events.mark(walk)

    def foreign(self, x: Tensor) -> bool:
        """True for a tensor on another stage's device, or of another segment's graph."""
        # Before stage 0 there is none: an older node is the caller's, or of another thread, which has its own numbers.
        if x.requires_grad and self._walk.stage:
            node = x.grad_fn
            if node is not None and node._sequence_nr() < self._walk.firsts[-1]:
                return True
        return self._homes.elsewhere(x, self._walk.stage)

    def maker(self, x: Tensor) -> int:
        """The stage whose segment has made the tensor's node, or the last one before on its device."""
        if x.requires_grad and x.grad_fn is not None:
            number = x.grad_fn._sequence_nr()
            for stage, first in reversed(list(enumerate(self._walk.firsts[:-1]))):
                if number >= first:
                    return stage
            return 0
        return self._homes.stage_on(x.device, self._walk.stage)

    def state(self, x: Tensor) -> Tensor | None:
        """A parameter's or buffer's copy, which is a leaf: its gradients are summed here, and go home once."""
        run, stage = self._walk.run, self._walk.stage
        if not x.is_leaf or not isinstance(x, Parameter) and not run.is_buffer(x):
            return None
        if run.adopted(x, stage):
            return x
        device = run.stages[stage].device

        def copy(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x.detach().to(device)
            return Parameter(y, x.requires_grad) if isinstance(x, Parameter) else y

        return run.copied(x, stage, copy)

    writing: Callable[[], None] | None = None
    refuses = True
    one_graph = False

    @staticmethod
    def differentiates(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuses a backward of the module's own, between blocks, through values that have crossed."""
        starts, inputs = differentiated(func, args, kwargs)
        known = {x.grad_fn for x in inputs or ()}
        crossed = [
            node for node in reached((x.grad_fn, 0) for x in starts).nodes
            if isinstance(node, _ENTER) and node not in known
        ]
        if crossed:
            raise RuntimeError(
                "the module's forward goes backward between blocks, through a value from an earlier stage: by a "
                "schedule each stage has a graph of its own, and the gradient would lack what lies before. Expected "
                "such a backward inside one block, or schedule='gpipe' without a loss_fn, which lays down one graph."
            )

    def carry(self, x: Tensor, source: int) -> Tensor:
        """The value as the output of a node of the present segment's graph."""
        stage = self._walk.stage
        tracked = x.requires_grad and self._walk.run.call.state.grad
        if tracked and source >= stage:  # Its B would wait for a gradient that nobody sends.
            raise RuntimeError(
                f"stage {stage} uses a tensor on the device of stage {source}, which comes later, and has a graph: "
                "expected values of earlier stages. Bring it to the stage's device before the call."
            )
        if tracked and x.layout is not torch.strided:
            raise RuntimeError(
                f"a {x.layout} tensor with a graph goes from stage {source} to stage {stage}: by a schedule, expected "
                "dense ones. Make it dense (x.to_dense()) before, or hand it to a block of its own stage."
            )
        edge = get_gradient_edge(x) if tracked else None
        route = None if self._routes is None else self._routes.of(source, stage)
        y = x.detach() if tracked else x
        if route is not None and x.device == route.source.device:
            timed = self._traces[source].copied if self._traces else None
            [y], event = route.carry([y], timed, self._events.of(source))
            stream.wait_for(route.target.compute, event)
            stream.spent(event)
        if edge is None:
            return y
        self.flights[source].taken.setdefault(stage, []).append(edge)
        return self.enter(y.requires_grad_(), source)

    def enter(self, y: Tensor, source: int | Key | None) -> Tensor:
        """The leaf, as the output of a node that a gradient is captured at."""
        with torch.enable_grad():
            made: Tensor = Enter.apply(y)
        self.flights[self._walk.stage].entered.setdefault(source, []).append(get_gradient_edge(made))
        return made

    def given(self, leaves: Sequence[Any], whose: Key | None) -> list[Any]:
        """The caller's input or target, entered."""
        if not self._walk.run.call.state.grad:
            return list(leaves)
        self.flights[self._walk.stage].entered[whose] = []
        return [
            self.enter(leaf, whose) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves
        ]


class SegmentOps(StageOps):
    """The ops of one stage of any module."""

    stage: SegmentStage  # type: ignore[assignment]

    def __init__(
        self,
        stage: SegmentStage,
        sums: Sums,
        ledger: Ledger | None,
        capture: Capture,
        shared: Shared,
        trace: StageTrace | None,
        walks: Sequence[Walk],
        carriers: Sequence[Detaching],
    ) -> None:
        super().__init__(stage, sums, ledger, capture, shared, trace)  # type: ignore[arg-type]
        stage.sink = self if shared.call.state.grad else None
        self._phony: Tensor | None = None
        self._walks = walks
        self._carriers = carriers

    def phony(self, key: object, parameters: Sequence[Tensor]) -> tuple[Tensor, Ids]:
        """The phony of all blocks, which leads nowhere: B asks for its gradient."""
        if self._phony is None:
            self._phony = unleaf(torch.empty(0, device=self.stage.device, requires_grad=True))
        return self._phony, [[*map(id, parameters)]]

    def graph(
        self, i: int, roots: Sequence[GradientEdge], entered: Sequence[GradientEdge], numbers: range
    ) -> Graph:
        """The graph of a microbatch on a block."""
        return self._capture.graph(roots, entered, numbers, **self._deferring(i))

    def _phonies(self) -> list[GradientEdge]:
        """Edges that autograd is to go through though nothing needs their gradients."""
        return [] if self._phony is None else [get_gradient_edge(self._phony)]

    def backward_block(
        self, i: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, wanted: set[int] | None,
        now: bool = False,
    ) -> Grads:
        """B of a microbatch on a block, inside of that on the stage."""
        return self._captured(i, list(roots), list(grads), graph)

    def begin(self) -> None:
        """F begins, in the microbatch's thread."""
        if self.trace is not None:
            self.trace.start()

    def end(self, i: int) -> None:
        """F has ended."""
        j, trace = self.stage.index, self.trace
        if trace is not None:
            trace.stop()
            trace.note("F", (i,))
        if j == self._shared.last:
            self._shared.reduction.add(i, self._walks[i].taken())
            self.differentiable = self.differentiable or bool(self._carriers[i].flights[j].value)

    def backward(self, i: int) -> None:
        """B, or BW if the ledger has it so."""
        shared, j, flight = self._shared, self.stage.index, self._carriers[i].flights[self.stage.index]
        pairs: list[tuple[GradientEdge, Tensor | None]] = []
        if j == shared.last:
            if flight.value:
                pairs += zip(flight.value, shared.reduction.seeds(i))
        else:
            word = shared.exchange.receive(j, ("B", i, j, j + 1))  # First of all: what is taken is known from now on.
            for target, edges in flight.taken.items():
                pairs += zip(edges, word if target == j + 1 else shared.exchange.receive(j, ("B", i, j, target)))
        roots = [edge for edge, grad in pairs if grad is not None]
        grads = [grad for _, grad in pairs if grad is not None]
        entered = [edge for edges in flight.entered.values() for edge in edges]
        graph = self._capture.graph(roots, entered, flight.numbers, self._phonies(), **self._deferring(i))
        found = iter(self._differentiate(i, list(roots), grads, graph))
        self._carriers[i].flights[j] = Flight()  # Its edges hold the graph.
        del pairs, roots, grads, entered, graph
        if j:
            flight.entered.setdefault(j - 1, [])
        for source, edges in flight.entered.items():
            returned = list(islice(found, len(edges)))
            if isinstance(source, int):
                shared.exchange.send(
                    j, source, ("B", i, source, j), returned, make=list, timed=self._timed if returned else None
                )
            else:
                self.given[source, i] = returned


