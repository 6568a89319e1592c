"""A segment: the graph of one microbatch on one stage, from F to B; and the stage, which has them in one call.

    stage 0 ── leave (number) ──> detached ── send ── copy ──> enter (guard) ──> stage 1
             <── gradient for that number <── copy ── captured at the guard's edge

Values enter through guard nodes, the layers run as they are, outputs leave detached. A value that leaves gets a
number. The stage that takes it remembers where its gradient must go: its *origin*. B captures the gradients that arrive
at the guard's outputs, and never runs the guard itself. If it does run, a gradient came on a path that the pipeline
doesn't know, and the stage before would lose it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.backward.graph_walk import Walk, walk
from splitpipe.backward.report import uses
from splitpipe.backward.split_backward import WeightGradStore
from splitpipe.core.stream import NamedStreams
from splitpipe.core.torch_private import RemovableHandle
from splitpipe.stage.call import Activation, Call, Origin
from splitpipe.stage.layers import StageLayers


class Guard(Function):
    """The tensors, as outputs of one node. It leads to a phony, since a node keeps the leaves that it leads to."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if any([grad is not None for grad in grads]):
            raise RuntimeError(
                "a gradient arrived at a stage's input on a path that the pipeline doesn't know, such as a loss "
                "that a layer or a hook keeps, and earlier stages would lose it. Expected every term of the loss in "
                "the model's output or in loss_fn(output, target)."
            )
        return None, *[None for _ in grads]


class Segment:
    """What F of a microbatch on a stage leaves for B.

    ``recompute``: of a checkpointed one, a function of the step and the stage that makes the segment with a graph.
    """

    def __init__(self, recompute: Callable[[Any, Any], Segment] | None = None) -> None:
        self.entries: list[GradientEdge] = []
        self.origins: list[Origin] = []
        self.roots: list[GradientEdge] = []  #: The edges of values that have left.
        self.graph = Walk({}, {}, [], {})
        #: Gradients: the number of the root, and the event after which they are there.
        self.arrived: list[tuple[int, Tensor, torch.Event | None]] = []
        self.recompute = recompute
        self.ran = False  #: Whether B has begun.
        #: The number of the next hook in the process. If it has moved by B, the hook may be one of an activation, and
        #: change a gradient behind the edge where B captures it for W: then B computes all.
        self.handle: int = RemovableHandle.next_id

    def enter(self, leaves: Sequence[Any], origins: Sequence[Origin | None]) -> list[Any]:
        """Leaves, as those with an origin enter this graph, through one guard. A tensor that occurs twice stays one."""
        known = {id(x): (x, origin) for x, origin in zip(leaves, origins) if origin is not None}
        if not known:
            return [*leaves]
        phony = torch.empty(0, device="cpu", requires_grad=True)
        with torch.enable_grad():
            guarded: Any = Guard.apply(phony, *[x for x, _ in known.values()])
        # Like get_gradient_edge, which makes a view to keep the node alive. The tensor does so, too.
        self.entries += [GradientEdge(x.grad_fn, x.output_nr, x) for x in guarded]
        self.origins += [origin for _, origin in known.values()]
        entered = dict(zip(known, guarded))
        return [entered.get(id(x), x) for x in leaves]

    def leave(self, x: Tensor) -> int:
        """Records that a tensor with a graph leaves; returns the number of its root."""
        self.roots.append(get_gradient_edge(x))
        return len(self.roots) - 1

    def close(self, split: bool, own: StageLayers) -> None:
        """Ends F on a stage with these layers. ``split``: whether weight gradients may wait."""
        hooked, ends = self.handle != RemovableHandle.next_id, {edge.node for edge in self.entries}
        self.handle = RemovableHandle.next_id
        self.graph = walk(self.roots, ends, split and not hooked)
        if split and not own.uses_known:
            own.add_uses(uses(self.roots, ends, self.graph, hooked), hooked)


class RunningStage:
    """A stage in one call: what its microbatches leave for B (``fwd_cache``), and for W (``store``).

    Drop-in, ``streams`` makes those of W, and ``limit`` bytes may wait for it. ``names``: of parameters.
    """

    def __init__(
        self, own: StageLayers, call: Call, limit: int | None, streams: NamedStreams | None, names: Mapping[int, str]
    ) -> None:
        self.own, self.index, self.name, self.device = own, own.index, own.name, own.place.device
        self.compute, self.names = call.computes[own.index], names
        # Checkpointed, what waits keeps what was just recomputed; otherwise, what the forward has kept anyway.
        limit = own.weight_bytes // (4 if call.checkpointed else 1) if limit is None else limit
        weights = None if streams is None else streams(self.device, "weights")
        self.store = WeightGradStore(self.compute, weights, None if streams is None else limit, names)
        self.fwd_cache: dict[int, Segment] = {}
        #: The leaves to which its microbatches' graphs lead, by identity.
        self.reached: dict[int, Tensor] = {}


def detach(values: Collection[Activation], segment: Segment, stage: int, grad: bool) -> None:
    """Takes what leaves a stage out of its graph, and notes the origins. A tensor that occurs twice stays one."""
    known: dict[int, tuple[Any, Origin | None]] = {}
    for x in [x for value in values for x in value.leaves]:
        if id(x) not in known:
            tracked = grad and isinstance(x, Tensor) and x.requires_grad
            known[id(x)] = (x.detach(), (stage, segment.leave(x))) if tracked else (x, None)
    for value in values:
        pairs = [known[id(x)] for x in value.leaves]
        value.leaves, value.origins = [x for x, _ in pairs], [origin for _, origin in pairs]
