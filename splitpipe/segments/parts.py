"""Drop-in: a microbatch's graph, cut where its stages begin; each stage's part is one node of the graph around.

    laid down   input <── layers of 0 <── Leave <── Copy <── Wait <── layers of 1 <── output
    cut         input <── BlockNode 0 <── Leave <── Copy <── Wait <── BlockNode 1 <── output

B is then one call of autograd's engine in a part, which leaves weight gradients to W. A microbatch has a thread, which
makes its nodes stage by stage: so their sequence numbers tell the stages. Of what crosses a border only the edge is
known here, and a tensor without memory stands in for it.

A graph stays whole if cutting it could change what autograd does. Its gradients are the same, and none is left to W:

    it leads to a node or leaf that is none of the model's: a weight that the caller has computed, say
    several microbatches share a part of it
    outputs share memory, so that a write to one is a write to another
    a stage takes two values, of which one was made of the other; or two stages have a weight whose gradient is B's:
    then autograd's way to one end of a part leads through a part before
"""
from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core import stream
from splitpipe.core.graph import LAST, Edge, rank, reached
from splitpipe.core.tensors import sharing
from splitpipe.core.torch_private import AccumulateGrad
from splitpipe.core.transfer import Crossing
from splitpipe.deferral.owners import Note, about
from splitpipe.loss.terms import Number, Unknown
from splitpipe.segments.stages import Run
from splitpipe.segments.walk import Walk
from splitpipe.stage.again import TENSORS
from splitpipe.training.capture import Graph
from splitpipe.training.held import Held
from splitpipe.training.node import BlockNode, DropinSink, used_by

#: The flat output of a microbatch and its nesting.
Flat = tuple[list[Any], Any]
#: What numbers among an output's leaves are made of, by the identity of these.
Numbers = Mapping[int, "Number | Unknown"]


class _Whole(Exception):
    """A graph can't be cut."""


class _Before:
    """The edges at which a stage's part ends; they are noted as a walk comes to them."""

    def __init__(self, part_of: Callable[[Any], int | None], around: Mapping[Edge, Tensor], sink: DropinSink, k: int):
        self._part_of, self._around, self._computed, self._stage = part_of, around, sink.computed, k
        self.edges: dict[Edge, None] = {}
        #: The nodes of the part.
        self.nodes: set[Any] = set()

    def __contains__(self, edge: Any) -> bool:
        if edge in self._around:
            self.edges[edge] = None
            return True
        node, stage = edge[0], self._stage
        kind: Any = type(node)
        found = self._part_of(node)
        if found == stage:
            self.nodes.add(node)
            return False
        if found is None and (kind is AccumulateGrad or edge in self._computed or about(kind)[1]):
            return False  # A cast of a weight may be another microbatch's.
        if found is None and Crossing.before(node) is None or found is not None and found > stage:
            raise _Whole
        self.edges[edge] = None
        return True


class _Cut:
    """The graph of one microbatch."""

    def __init__(self, walk: Walk, copies: Mapping[Edge, Tensor], dry: bool) -> None:
        self._walk, self._run, self._dry = walk, walk.run, dry
        #: What there is of the graph around, by the edges that lead there.
        self._around: dict[Edge, Tensor] = {**copies, **walk.inputs}
        self._crossings: dict[Edge, Crossing] = {}
        #: The edges by which the stages' values leave them, in order.
        self._roots: list[dict[Edge, None]] = [{} for _ in self._run.stages]
        self._known: dict[Edge, Tensor] = {}
        self._graphs: dict[int, Graph] = {}
        self._notes: list[tuple[Note, Tensor, bool, str]] = []
        #: The nodes of all parts.
        self.nodes: set[Any] = set()

    def find(self, values: Iterable[Tensor]) -> None:
        """Finds the parts of the graph behind the values that leave it."""
        for x in values:
            if type(x) not in TENSORS:
                raise _Whole
            self._leaving(_edge(x), x)
        for k in reversed(range(len(self._run.stages))):
            if self._roots[k]:
                self._graphs[k] = self._part(k)
        used = {k: used_by(graph) for k, graph in self._graphs.items()}
        for k, graph in self._graphs.items():
            if any([id(leaf) in used[j] for j in used if j < k for leaf in graph.leaves]):
                raise _Whole  # B of this stage would go on to it by way of that one.

    def _leaving(self, edge: Edge, x: Tensor | None = None) -> None:
        """Notes an edge by which a value leaves a part, and the value, if it is the user's."""
        if edge in self._around:
            return
        if x is not None:
            self._known.setdefault(edge, x)
        stage = self._walk.maker(edge[0])
        if stage is not None:
            self._roots[stage][edge] = None
            return
        crossing = Crossing.before(edge[0])
        if crossing is None:
            raise _Whole
        self._crossings[edge] = crossing
        self._leaving(crossing.edge, None if crossing.copied else x)

    def _part(self, k: int) -> Graph:
        sink = self._sink(k)
        ends, seen = _Before(self._walk.maker, self._around, sink, k), list[tuple[Tensor, bool, str]]()
        try:
            graph = sink.graph(self._walk.i, _edges(self._roots[k]), (), range(2**64), seen, ends)
        finally:
            if sink.note is not None:
                self._notes += [(sink.note, *each) for each in seen]
        here = all([x.device == sink.device for x in used_by(graph).values()])
        if graph.bound or graph.keep_graph or not here:
            raise _Whole
        for edge in ends.edges:
            self._leaving(edge)
        direct = ends.edges.keys() - self._crossings.keys()
        if len(ends.edges) > 1 and direct and not self._dry and _lead_to(ends.edges, direct):
            raise _Whole  # A gradient for one would be that by way of another, too.
        self.nodes |= ends.nodes
        return graph._replace(entered=_edges(ends.edges))

    def _sink(self, k: int) -> DropinSink:
        sink = self._run.stages[k].sink
        assert isinstance(sink, DropinSink)
        return sink

    def note(self) -> None:
        """Notes for the report how the gradients of weights are computed."""
        for note, x, deferred, why in self._notes:
            note(x, deferred, why)

    def join(self) -> None:
        """Makes the nodes of the graph around."""
        walk, stages = self._walk, self._run.stages
        for k, graph in sorted(self._graphs.items()):
            stage, sink, roots = stages[k], self._sink(k), self._roots[k]
            inputs = [self._outer((edge.node, edge.output_nr)) for edge in graph.entered]
            where = f"{stage}, microbatch {walk.i} of {len(self._run.call.rows)}"
            with stream.use(stage.compute):
                phony, ids = sink.phony_of(graph, self._run.calls.parameters(k))
                values = [self._value(edge) for edge in roots]
                held = Held(graph, _edges(roots), sink, walk.i, ids, where)
                made: tuple[Tensor, ...] = BlockNode.apply(held, values, phony, *inputs)
            rank(made[0], LAST + 1 + walk.i * len(stages) + k)
            self._around.update(zip(roots, made))

    def _outer(self, edge: Edge) -> Tensor:
        """The tensor of the graph around for what crosses a border by an edge."""
        found = self._around.get(edge)
        if found is None:
            crossing = self._crossings[edge]
            found = self._around[edge] = crossing.again(self._outer(crossing.edge), self._value(edge))
        return found

    def _value(self, edge: Edge) -> Tensor:
        """What has left by an edge, or a tensor without memory like it."""
        found = self._known.get(edge)
        if found is None:
            meta = edge[0]._input_metadata[edge[1]]
            found = torch.empty((), dtype=meta.dtype, device=meta.device).expand(meta.shape)
        return found.detach()

    def given(self, x: Any) -> Any:
        """A value in the graph around."""
        return self._outer(_edge(x)) if _leaves(x) else x


def _edge(x: Tensor) -> Edge:
    return x.grad_fn, x.output_nr


def _edges(edges: Iterable[Edge]) -> list[GradientEdge]:
    return [GradientEdge(*edge) for edge in edges]


def _leaves(x: Any) -> bool:
    """True for a tensor with a graph."""
    return isinstance(x, Tensor) and x.grad_fn is not None


def _lead_to(edges: Iterable[Edge], ends: Container[Edge]) -> bool:
    """True if a graph leads from the nodes of some edges to one of the ends."""
    stack = [after for node, _ in edges for after in node.next_functions]
    seen: set[Any] = set()
    while stack:
        edge = stack.pop()
        if edge in ends:
            return True
        node = edge[0]
        if node is not None and node not in seen:
            seen.add(node)
            stack += node.next_functions
    return False


def _values(leaves: Sequence[Any], numbers: Numbers) -> list[Tensor]:
    """What has a graph of an output's leaves, and of what numbers among these are made of."""
    found = [x for x in leaves if _leaves(x)]
    made = [each for each in numbers.values() if isinstance(each, Number)]
    return found + [term.value for each in made for term in each.terms if _leaves(term.value)]


def cut(
    run: Run, walks: Sequence[Walk], found: Sequence[Flat], numbers: Sequence[Numbers], dry: bool = False
) -> tuple[list[Flat], list[dict[int, Number | Unknown]]]:
    """Cuts the graphs of all microbatches that are not checkpointed, as far as that can be done.

    Args:
        run: the call.
        walks: of its microbatches, which are through.
        found: their outputs.
        numbers: what numbers among these are made of.
        dry: whether to note for the report what would be done, alone.

    Returns:
        The outputs as values of the graph around, and the same numbers of these.
    """
    copies = {_edge(y): y for _, y in run.copies() if y.grad_fn is not None}
    cuts: list[_Cut | None] = [None] * len(walks)
    seen: set[Any] = set()
    whole = False
    for i, walk in enumerate(walks):
        if i < run.call.checkpointed:
            continue
        each = _Cut(walk, copies, dry)
        try:
            own = {id(x): x for x in found[i][0] if isinstance(x, Tensor) and x.requires_grad}
            if sharing([*own.values()], [x for x in walk.inputs.values() if id(x) not in own]):
                raise _Whole
            each.find(_values(found[i][0], numbers[i]))
        except _Whole:
            whole = True  # What keeps one whole may be a part of others.
        else:
            cuts[i] = each
        whole = whole or not seen.isdisjoint(each.nodes)
        seen |= each.nodes
    for i in range(min(run.call.checkpointed, len(walks)) if seen and not whole else 0):
        whole = whole or not seen.isdisjoint(reached(map(_edge, _values(found[i][0], numbers[i]))).nodes)
    outputs, made = list[Flat](found), [{**each} for each in numbers]
    if whole:
        for stage in run.stages:
            stage.facts.whole = True
        return outputs, made
    for i, one in enumerate(cuts):
        if one is None:
            continue
        one.note()
        if not dry:
            one.join()
            leaves = found[i][0]
            new = [one.given(x) for x in leaves]
            outputs[i] = new, found[i][1]
            known = {id(x): id(y) for x, y in zip(leaves, new)}
            made[i] = {
                known[key]: number.mapped(one.given) if isinstance(number, Number) else number
                for key, number in numbers[i].items()
            }
    return outputs, made
