"""Scheduled: values go to later stages outside autograd; each segment has a separate graph.

A value of an earlier stage enters where the module's code uses it, or where a stage of a Sequential begins. The edges
where it leaves and enters are recorded: B runs between them.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from splitpipe.core import stream
from splitpipe.core.graph import Enter, reached
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.core.transfer import Routes
from splitpipe.engine.code import CodeForward
from splitpipe.engine.dropin import Beside, Events, Sent
from splitpipe.engine.forward import MicrobatchForward
from splitpipe.engine.values import differentiated
from splitpipe.partition.homes import Homes
from splitpipe.skip.box import Key
from splitpipe.stage.checkpoint import Remade
from splitpipe.training.record import StageTrace

_ENTER: Any = Enter._backward_cls


@dataclass
class Flight:
    """The edges that bound a segment's graph, from its F to its B."""

    #: The edges from which later stages took values of this one, by stage.
    taken: dict[int, list[GradientEdge]] = field(default_factory=dict)
    #: The edges where values of earlier stages entered, by stage; also the caller's input and target.
    entered: dict[int | Key | None, list[GradientEdge]] = field(default_factory=dict)
    #: The loss, in the last stage.
    value: list[GradientEdge] = field(default_factory=list)
    numbers: range = range(0)


class DetachedTransfer:
    """Passes values to later stages outside autograd; ``flights`` has their edges, by stage."""

    def __init__(self, forward: MicrobatchForward, routes: Routes | None, traces: Sequence[StageTrace]) -> None:
        self._forward = forward
        self._routes = routes
        self._traces = traces
        self.flights = [Flight() for _ in forward.run.stages]

    def entering(self) -> None:
        """Nothing: values that arrive are waited for."""

    def leaving(self, forward: MicrobatchForward) -> None:
        """Ends a segment."""
        self.flights[forward.stage].numbers = range(forward.firsts[-1], _get_sequence_nr())

    def send(self, values: Sequence[Tensor], source: int, target: int, frame: Remade | None) -> Sent:
        """Sends values of the current stage to a later one, where those that require grad are leaves.

        ``frame``: if the stage is checkpointed. An op recomputes it before its gradient arrives, or its own nodes do.
        """
        grad = self._forward.run.call.state.grad
        tracked = [x.requires_grad and grad for x in values]
        edges = [get_gradient_edge(x) for x, each in zip(values, tracked) if each]
        if edges:
            self.flights[source].taken.setdefault(target, []).extend(edges)
        plain = [x.detach() if each else x for x, each in zip(values, tracked)]
        route, event = None if self._routes is None else self._routes.of(source, target), None
        if route is not None:
            plain, event = route.carry(plain, self._traces[source].copied if self._traces else None)
        return [x.requires_grad_() if each else x for x, each in zip(plain, tracked)], route, event

    def take(self, sent: Sent, source: int) -> list[Tensor]:
        """Takes values that were sent, on the current stage."""
        values, route, event = sent
        if route is not None and event is not None:
            stream.wait_for(route.target.compute, event)
            stream.spent(event)
        if not self._forward.run.call.state.grad:
            return [*values]
        return [self.enter(x, source) if x.requires_grad else x for x in values]

    def enter(self, y: Tensor, source: int | Key | None) -> Tensor:
        """The leaf, as the output of a node at which a gradient is captured."""
        with torch.enable_grad():
            made: Tensor = Enter.apply(y)
        self.flights[self._forward.stage].entered.setdefault(source, []).append(get_gradient_edge(made))
        return made

    def opening(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the caller's input, entered."""
        return self.given(leaves, None)

    def given(self, leaves: Sequence[Any], whose: Key | None) -> list[Any]:
        """The caller's input or target, entered."""
        if not self._forward.run.call.state.grad:
            return list(leaves)
        self.flights[self._forward.stage].entered[whose] = []
        return [
            self.enter(leaf, whose) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves
        ]


class CodeDetachedTransfer(DetachedTransfer):
    """The same for the values of a module's own code, which it finds by their devices and nodes."""

    def __init__(
        self, forward: CodeForward, homes: Homes, routes: Routes | None, events: Events, traces: Sequence[StageTrace]
    ) -> None:
        super().__init__(forward, routes, traces)
        self._of, self._homes, self._events = forward, homes, events
        self._beside = Beside(forward, events) if forward.run.call.beside else None
        self.using = None if self._beside is None else self._beside.hold

    def entering(self) -> None:
        """Begins a segment, after those before it on its device."""
        if self._beside is not None:
            self._beside.enter()

    def leaving(self, forward: MicrobatchForward) -> None:
        """Ends a segment."""
        super().leaving(forward)
        if self._routes is not None:
            self._events.mark(forward)

    def foreign(self, x: Tensor) -> bool:
        """True for a tensor on another stage's device, or in another segment's graph."""
        # Nothing comes before stage 0: an older node is the caller's, or another thread's, which counts separately.
        if x.requires_grad and self._of.stage:
            node = x.grad_fn
            if node is not None and node._sequence_nr() < self._of.firsts[-1]:
                return True
        return self._homes.elsewhere(x, self._of.stage)

    def maker(self, x: Tensor) -> int:
        """The stage whose segment made the tensor's node, or else the last one before on its device."""
        if x.requires_grad and x.grad_fn is not None:
            number = x.grad_fn._sequence_nr()
            for stage, first in reversed(list(enumerate(self._of.firsts[:-1]))):
                if number >= first:
                    return stage
            return 0
        return self._homes.stage_on(x.device, self._of.stage)

    def state(self, x: Tensor) -> Tensor | None:
        """A parameter's or buffer's copy, which is a leaf: its gradients are summed here, and returned once."""
        run, stage = self._of.run, self._of.stage
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
        """Raises for a backward in the module's own code, between blocks, through values that have crossed."""
        starts, inputs = differentiated(func, args, kwargs)
        known = {x.grad_fn for x in inputs or ()}
        crossed = [
            node for node in reached((x.grad_fn, 0) for x in starts).nodes
            if isinstance(node, _ENTER) and node not in known
        ]
        if crossed:
            raise RuntimeError(
                "the module's forward runs backward between blocks, through a value from an earlier stage. With a "
                "schedule, each stage has a separate graph, so the gradient would lack the earlier part. Expected such "
                "a backward inside one block, or schedule='gpipe' without a loss_fn, which makes a single graph."
            )

    def carry(self, x: Tensor, source: int) -> Tensor:
        """The value as the output of a node in the current segment's graph."""
        stage = self._forward.stage
        tracked = x.requires_grad and self._forward.run.call.state.grad
        if tracked and source >= stage:  # Its B would wait for a gradient that is never sent.
            raise RuntimeError(
                f"stage {stage} uses a tensor with a graph on the device of stage {source}, which comes later: "
                "expected values of earlier stages. Move it to the stage's device before the call."
            )
        if tracked and x.layout is not torch.strided:
            raise RuntimeError(
                f"a {x.layout} tensor with a graph goes from stage {source} to stage {stage}: with a schedule, "
                "expected dense tensors. Make it dense (x.to_dense()) before, or pass it to a block of the same stage."
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
