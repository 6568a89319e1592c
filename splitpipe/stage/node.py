"""Drop-in: a microbatch on a stage as one node of the graph that the user's backward walks; its backward is B.

    outer graph    ... <── Join <── StageNode <── Leave, Fork <── ...    one node: its edges are inputs, and Flushes
                                      ¦
    the stage's own graph     Enter <── layers <── output                  made by F, or, checkpointed, in backward

So nothing in Python stands between the layers' own nodes. Hooks of parameters fire once, at the Flush. Where gradients
are to be differentiated, or a loss comes from a tensor inside of a stage, ``backward="autograd"`` has one graph.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import Edge, enter, kinds_of
from splitpipe.core.torch_private import (
    AccumulateGrad,
    _current_graph_task_id,
    _get_current_graph_task_keep_graph,
    _get_sequence_nr,
    _will_engine_execute_node,
)
from splitpipe.deferral.flush import Flushes, LeafStashes
from splitpipe.deferral.pending import Node
from splitpipe.stage.call import Call, Parcel
from splitpipe.stage.capture import Capture, Grads, Graph, ParkedHooks
from splitpipe.stage.saved import Record, load, recomputation_error
from splitpipe.stage.stage import Again, Result, Skips, Stage, Task


class StageParts(NamedTuple):
    """What the microbatches of one stage have in common: its stashes, and their phonies."""

    stashes: LeafStashes
    flushes: Flushes


class Flight:
    """The graph of a microbatch on a stage, from F to B: made by F, or to be made ``again``."""

    def __init__(self, stage: Stage, stashes: LeafStashes, microbatch: int) -> None:
        self._stage = stage
        self._stashes = stashes
        self._microbatch = microbatch
        self._graph: tuple[Sequence[GradientEdge], Graph] | None = None
        self._again: Again | None = None
        self._kinds: list[Any] = []
        self._places: list[int] = []
        self._versions: list[Record] = []  # Of leaves, to which nobody may write before they are used again.
        self._remade: dict[int, tuple[Sequence[GradientEdge], Graph]] = {}  # By graph task.
        self._lock = threading.RLock()

    def keep(self, roots: Sequence[GradientEdge], graph: Graph) -> None:
        """F has made the graph."""
        self._graph = roots, graph

    def keep_run(self, again: Again, kinds: list[Any], places: list[int], leaves: Sequence[Tensor]) -> None:
        """F has made a graph of these kinds of nodes, which is gone; ``places``: of outputs, in their order."""
        self._again, self._kinds, self._places = again, kinds, places
        self._versions = [(leaf, leaf._version) for leaf in leaves]

    def recompute(self) -> None:
        """Makes the graph of the running graph task."""
        with self._lock:
            task = _current_graph_task_id()
            if self._again is not None and self._graph is None and task not in self._remade:
                self._remade[task] = self._made(self._again)

    def _made(self, again: Again) -> tuple[Sequence[GradientEdge], Graph]:
        first = _get_sequence_nr()
        for leaf, version in self._versions:
            if leaf._version != version:
                load((leaf, version))
        entered, out, skips = again()
        numbers = range(first, _get_sequence_nr())
        made = [x for parcel in (out, *skips.values()) for x in parcel.leaves]
        roots = [get_gradient_edge(made[k]) for k in self._places if k < len(made) and made[k].requires_grad]
        kinds = kinds_of(_pairs(roots), {*_pairs(entered)})
        if kinds != self._kinds:
            at = next(
                (k for k, (one, other) in enumerate(zip(kinds, self._kinds)) if one is not other),
                min(len(kinds), len(self._kinds)),
            )
            names = [each[at].__name__ if at < len(each) else "nothing" for each in (kinds, self._kinds)]
            raise recomputation_error(
                f"made {names[0]} where the forward made {names[1]}, {at} nodes before its output"
            )
        stage, stashes = self._stage, self._stashes
        capture: Capture = stage.capture()
        graph = capture.graph(
            roots, entered, numbers, groups=stashes, gains=stashes.gains(self._microbatch),
            note=stage.note(),
        )
        return roots, graph

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], wanted: set[int], keep: bool) -> Grads:
        """B: the gradients of the inputs ``needed``; those of the leaves ``wanted`` go to the stash."""
        found = self._graph
        if found is None:
            self.recompute()
            with self._lock:
                found = self._remade.pop(_current_graph_task_id())
            if keep:
                self._graph = found
        roots, graph = found
        places = [k for k, leaf in enumerate(graph.leaves) if id(leaf) in wanted]
        entered = [edge for edge, need in zip(graph.entered, needed) if need]
        graph = graph._replace(
            entered=entered,
            leaves=[graph.leaves[k] for k in places],
            edges=[graph.edges[k] for k in places],
            owners=[
                owner for owner in graph.owners if not wanted.isdisjoint(map(id, owner.group.parameters))
            ],
            keep_graph=graph.keep_graph or keep,
        )
        pairs = [(edge, grad) for edge, grad in zip(roots, grads) if grad is not None]
        hooks = ParkedHooks(threading.get_ident())
        capture: Capture = self._stage.capture(hooks)
        stash = self._stashes.open() if graph.leaves or graph.owners else None
        now = self._again is not None
        try:
            inputs, own = capture.backward(
                [edge for edge, _ in pairs], [grad for _, grad in pairs], graph,
                None if stash is None else lambda group, new: stash.leave(group, new, now),
            )
        finally:
            hooks.put_back()
        if stash is not None:
            stash.sums.add(graph.leaves, own)
        given = iter(inputs)
        return [next(given) if need else None for need in needed]


class StageNode(Node):
    """The outputs of a stage that require grad; in backward, B."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, outputs: list[Tensor], leaves: Sequence[frozenset[int]], *_: Tensor) -> Any:
        """The outputs, outside of their graph; given phonies, of which each leads to some leaves, and the inputs."""
        ctx.set_materialize_grads(False)
        ctx.flight, ctx.leaves = flight, leaves
        return tuple([x.detach() for x in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flight, edges, count = ctx.flight, ctx.next_functions, len(ctx.leaves)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was passed to a backward through a SplitPipe, whose stages have graphs of their own "
                "that no second derivative goes through: expected SplitPipe(..., backward='autograd')."
            )
        if flight is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the graphs of its stages were freed by the first "
                "backward. Pass retain_graph=True to it."
            )
        keep = _get_current_graph_task_keep_graph()
        if not keep:
            ctx.flight = None
        nothing = (None,) * (3 + count)
        if all([grad is None for grad in grads]):
            return *nothing, *(None,) * (len(edges) - count)
        wanted = {
            leaf for (node, _), leaves in zip(edges[:count], ctx.leaves) if _will_engine_execute_node(node)
            for leaf in leaves
        }
        # Of a leaf the engine does not say.
        needed = [type(node) is AccumulateGrad or _will_engine_execute_node(node) for node, _ in edges[count:]]
        return *nothing, *flight.backward(grads, needed, wanted, keep)


class NodeTask(Task):
    """A microbatch on a stage, as a node."""

    def __init__(
        self, stage: Stage, parts: StageParts, call: Call, i: int, value: Parcel, skips: Skips, **options: Any
    ) -> None:
        super().__init__(stage, call, i, value, skips, **options)
        self._parts = parts

    def __call__(self) -> Result:
        outer: dict[int, tuple[Tensor, Tensor]] = {}
        stage, stashes = self.stage, self._parts.stashes

        def entered(parcel: Parcel) -> Parcel:
            for k in parcel.differentiable:
                x = parcel.leaves[k]
                if id(x) not in outer:
                    outer[id(x)] = x, enter(x.detach().requires_grad_())
            return parcel.holding([outer[id(x)][1] if id(x) in outer else x for x in parcel.leaves])

        first = _get_sequence_nr()
        with stream.use(stage.compute), torch.enable_grad():
            self.value, self.skips = entered(self.value), {key: entered(skip) for key, skip in self.skips.items()}
        edges = [get_gradient_edge(inner) for _, inner in outer.values()]
        result = super().__call__()
        parcels = [result.value, *result.skips.values()]
        made = [x for parcel in parcels for x in parcel.leaves]
        places = [k for k, x in enumerate(made) if isinstance(x, Tensor) and x.requires_grad]
        # One that is there twice is one again.
        places = [*{id(made[k]): k for k in reversed(places)}.values()][::-1]
        if not places:
            return result
        outputs = [made[k] for k in places]
        roots = [get_gradient_edge(x) for x in outputs]
        flight = Flight(stage, stashes, self.number[0])
        numbers, again = range(first, _get_sequence_nr()), result.again
        capture: Capture = stage.capture()
        if again is None:
            graph = capture.graph(
                roots, edges, numbers, groups=stashes, gains=stashes.gains(self.number[0]), note=stage.note()
            )
            flight.keep(roots, graph)
        else:
            graph = capture.graph(roots, edges, numbers)
            flight.keep_run(again, kinds_of(_pairs(roots), {*_pairs(edges)}), places, graph.leaves)
        leaves = {id(leaf): leaf for leaf in graph.leaves}
        leaves.update({id(leaf): leaf for owner in graph.owners for leaf in owner.group.parameters})
        with stream.use(stage.compute), torch.enable_grad():
            phonies = self._parts.flushes.of([*leaves.values()])
            given = [*[phony for phony, _ in phonies], *[x for x, _ in outer.values()]]
            found = StageNode.apply(flight, outputs, [ids for _, ids in phonies], *given)
        new = {id(x): y for x, y in zip(outputs, found)}
        value, *skips = [parcel.holding([new.get(id(x), x) for x in parcel.leaves]) for parcel in parcels]
        return Result(value, dict(zip(result.skips, skips)), None if again is None else flight)


def _pairs(edges: Any) -> list[Edge]:
    return [(edge.node, edge.output_nr) for edge in edges]
