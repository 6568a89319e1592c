"""Drop-in: after the forward, a microbatch's graph is cut at the stages' borders; each part becomes one node.

    before   input <── layers of 0 <── Leave <── Copy <── Wait <── layers of 1 <── output
    after    input <── BlockNode 0 <── Leave <── Copy <── Wait <── BlockNode 1 <── output

B of a part is then one call of autograd's engine, and leaves weight gradients to W. One thread makes all nodes of a
microbatch, stage by stage, so their sequence numbers show the stages, except for nodes that were ranked or with which a
value has crossed, which the MicrobatchForward knows. Only the edge of a value that crosses is known, so a tensor
without memory represents it.

A graph stays whole if cutting it could change what autograd does. Its gradients are the same, but none is left to W:

    it leads to a node or leaf that isn't the model's (such as a weight that the caller has computed), or to a leaf on
    another device; or it contains a reentrant checkpoint or another pipeline
    several microbatches share a part of it
    outputs share memory, so that writing to one writes to another; an output is an object that may contain tensors; or
    a microbatch returns several outputs, and hooks on one must see what comes from another
    a weight without a rule is also an earlier stage's, or the caller's graph leads to it: B would follow that path
    a value crosses inside an object, unseen, or isn't a plain tensor
    hardly any weight gradient in it could be left to W, which isn't worth a walk through it
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import LAST, Edge, pairs_of, rank, reached
from splitpipe.core.tensors import sharing
from splitpipe.core.torch_private import AccumulateGrad
from splitpipe.core.transfer import Crossing
from splitpipe.deferral.owners import Note
from splitpipe.engine.forward import MicrobatchForward
from splitpipe.engine.run import Run
from splitpipe.loss.terms import Number, Unknown
from splitpipe.stage.run import TENSORS
from splitpipe.training.capture import Graph
from splitpipe.training.node import BlockNode, Held
from splitpipe.training.recomputed import OPEN
from splitpipe.training.sink import DropinSink

#: The flat output of a microbatch and its nesting.
Flat = tuple[list[Any], Any]
#: What numbers among an output's leaves consist of, by their identity.
Numbers = Mapping[int, "Number | Unknown"]


class Cutting:
    """Whether to cut the graphs of a call's microbatches."""

    def __init__(
        self, split: bool, several: bool = True, writes: dict[Any, bool] | None = None, kind: Any = None
    ) -> None:
        """On one device, a forward may write to a value in one stage, and read it through a view from another one.

        A whole graph handles that, but a cut one wouldn't. So the first forward of a kind is ``watched``: nothing is
        cut, and ``writes`` records whether a stage has written to a value of an earlier one.

        Args:
            split: whether weight gradients are deferred.
            several: whether there are several devices, or each stage sees only its input from other stages.
            writes: by kind, kept from call to call.
            kind: that of this call.
        """
        self._writes: dict[Any, bool] = {} if writes is None else writes
        written = None if several else self._writes.get(kind)
        self._kind, self._several = kind, several
        #: Whether values are recognised by the stages that have made them.
        self.known = split and not written
        #: Whether there are nodes where values go from one stage to another.
        self.marked = split and (several or written is False)
        self.watched = self.known and not self.marked
        #: Called with a write to a value of an earlier stage. If values are copied, there is nothing to record.
        self.write = self._write if self.known and not several else None

    def _write(self) -> None:
        self._writes[self._kind] = True

    def end(self) -> bool:
        """Ends the forward; returns True if its graphs stay whole."""
        return not self._several and self._writes.setdefault(self._kind, False)


#: A graph with more nodes than this for each that owns a weight isn't worth cutting: W of ResNet-101, with 4 on a CPU,
#: saves more time than the walks take, and that of AmoebaNet-D, with 620, saves less.
_NODES_AN_OWNER = 100


class _Whole(Exception):
    """Raised for a graph that can't be cut."""


class _Ends:
    """The edges at which a stage's part ends. Looking one up records it, or the node that it leads to."""

    def __init__(self, forward: MicrobatchForward, around: Mapping[Edge, Tensor], stage: int, dry: bool) -> None:
        self._forward, self._around, self._stage, self._dry = forward, around, stage, dry
        self.edges: dict[Edge, None] = {}
        #: The nodes of the part.
        self.nodes: set[Any] = set()
        #: True if those between owners and weights are known to have been made here.
        self.owned = False

    def __contains__(self, edge: Any) -> bool:
        if not self._ends(edge):
            return False
        self.edges[edge] = None
        return True

    def within(self, nodes: Sequence[Any], tails: Sequence[Any]) -> bool:
        """True if the forward has made all nodes on this stage, except for casts of leaves; records them."""
        forward, k = self._forward, self._stage
        span, crossed = forward.span(k), forward.crossed
        if not crossed.keys().isdisjoint(nodes) or not {node for node, _ in self._around}.isdisjoint(nodes):
            return False
        others = [node for node in (*nodes, *tails) if node._sequence_nr() not in span]
        if not all([_may_be_shared(node) or forward.maker(node, k) == k for node in others]):
            return False
        self.owned = True
        self.nodes.update(nodes)
        self.nodes.difference_update([node for node in nodes if type(node).__name__ == _CAST and _may_be_shared(node)])
        return True

    def _ends(self, edge: Edge) -> bool:
        if edge in self._around:
            return True
        node = edge[0]
        if _may_be_shared(node):
            return False
        found = self._forward.maker(node, self._stage)
        if found == self._stage:
            if node in self._forward.crossed:
                return True
            self.nodes.add(node)
            return False
        # For a value that crosses without a separate node, both parts would call the hooks.
        if found is None or found > self._stage or not self._dry:
            raise _Whole
        return True


class _Cut:
    """The graph of one microbatch."""

    def __init__(self, forward: MicrobatchForward, copies: Mapping[Edge, Tensor], dry: bool) -> None:
        self._forward, self._run, self._dry = forward, forward.run, dry
        self._copies = copies
        #: The tensors of the surrounding graph that stages get, by the edges at which their parts end.
        self._given: dict[Edge, Tensor] = {**copies, **forward.inputs}
        #: Those that stages return, by the edges at which they leave the parts.
        self._outputs: dict[Edge, Tensor] = {**copies}
        #: These edges for each stage, in order.
        self._roots: list[dict[Edge, None]] = [{} for _ in self._run.stages]
        self._known: dict[Edge, Tensor] = {}
        self._graphs: dict[int, Graph] = {}
        self._used: dict[int, dict[int, Tensor]] = {}
        self._notes: list[tuple[Note, Tensor, bool, str]] = []
        #: The nodes of all parts.
        self.nodes: set[Any] = set()

    def find(self, values: Iterable[Tensor]) -> None:
        """Finds the parts of the graph behind the values that leave it."""
        stages = range(len(self._run.stages))
        for x in values:
            if type(x) not in TENSORS:
                raise _Whole
            self._known.setdefault(_edge(x), x)
            self._leaving(_edge(x), len(stages))
        for k in reversed(stages):
            if self._roots[k]:
                self._graphs[k] = self._part(k)
        self._verify_leaves()

    def _leaving(self, edge: Edge, stage: int) -> None:
        """Records an edge at which a value leaves a part for a stage."""
        if edge in self._copies:
            return
        found = self._forward.maker(edge[0])
        # Autograd remakes a view's node after a write to its memory, possibly in a later stage.
        if found is None or found >= stage:
            raise _Whole
        self._roots[found][edge] = None

    def _part(self, k: int) -> Graph:
        sink = self._sink(k)
        ends, seen = _Ends(self._forward, self._given, k, self._dry), list[tuple[Tensor, bool, str]]()
        # With any numbers: ``ends`` knows the part's own nodes.
        graph = sink.graph(self._forward.i, _edges(self._roots[k]), (), range(2**64), seen=seen, ends=ends)
        if sink.note is not None:
            self._notes += [(sink.note, *each) for each in seen]
        self._used[k], here = sink.used(graph)
        if graph.bound or graph.keep_graph or not here or not (ends.owned or self._owns_tails(graph, k)):
            raise _Whole
        for edge in ends.edges:
            if edge not in self._given:
                self._leaving(edge if self._dry else Crossing.of(edge[0]).edge, k)
        if not self.nodes.isdisjoint(ends.nodes):  # Different threads' numbers may be equal by chance.
            raise _Whole
        self.nodes |= ends.nodes
        return graph._replace(entered=_edges(ends.edges))

    def _owns_tails(self, graph: Graph, k: int) -> bool:
        """True if the nodes between owners and weights were made in this forward: W runs through them separately."""
        for owner in graph.owners:
            after = owner.node.next_functions
            for number in owner.edges:
                node = after[number][0]
                while type(node) is not AccumulateGrad and node is not None:
                    if self._forward.maker(node, k) is None and type(node).__name__ != _CAST:
                        return False
                    node = node.next_functions[0][0]
        return True

    def _verify_leaves(self) -> None:
        """Raises if a path to a leaf that B asks for leads out of the part, since autograd follows all of them."""
        used: set[int] = set()
        shared: set[Edge] = set()
        for k, graph in sorted(self._graphs.items()):
            ends = {(edge.node, edge.output_nr) for edge in graph.entered} & self._given.keys()
            around = [get_gradient_edge(self._given[edge]) for edge in ends]
            used.update([id(leaf) for leaf in reached(pairs_of(around)).leaves])
            if not used.isdisjoint(map(id, graph.leaves)) or not self._dry and not shared.isdisjoint(ends):
                raise _Whole
            used |= self._used[k].keys()
            shared |= ends

    def _sink(self, k: int) -> DropinSink:
        sink = self._run.stages[k].sink
        assert isinstance(sink, DropinSink)
        return sink

    @property
    def pays(self) -> bool:
        """True if enough is left to W to make up for the walks through the graphs of all microbatches."""
        return len(self.nodes) <= _NODES_AN_OWNER * sum([len(graph.owners) for graph in self._graphs.values()])

    def note(self, pays: bool = True) -> None:
        """Records for the report how the gradients of weights are computed."""
        for note, x, deferred, why in self._notes:
            note(x, deferred and pays, why if pays or not deferred else "too few others could be deferred")

    def join(self) -> None:
        """Makes the nodes of the surrounding graph."""
        forward, stages = self._forward, self._run.stages
        for k, graph in sorted(self._graphs.items()):
            stage, sink, roots = stages[k], self._sink(k), self._roots[k]
            inputs = [self._input((edge.node, edge.output_nr)) for edge in graph.entered]
            where = f"{stage}, microbatch {forward.i} of {len(self._run.call.rows)}"
            with stream.use(stage.compute):
                phony, ids = sink.phony_of(graph, self._run.parameters(k))
                values = [self._value(edge) for edge in roots]
                held = Held(graph, _edges(roots), sink, forward.i, ids, where)
                made: tuple[Tensor, ...] = BlockNode.apply(held, values, phony, *inputs)
            rank(made[0], LAST + 1 + forward.i * len(stages) + k)
            self._outputs.update(zip(roots, made))

    def _input(self, edge: Edge) -> Tensor:
        """The tensor of the surrounding graph for an edge at which a part ends."""
        found = self._given.get(edge)
        if found is None:
            crossing = Crossing.of(edge[0])
            found = crossing.again(self._outputs[crossing.edge], self._value(edge))
        return found

    def _value(self, edge: Edge) -> Tensor:
        """The value that has left at an edge, or a tensor without memory like it."""
        found = self._known.get(edge)
        if found is None:
            meta = edge[0]._input_metadata[edge[1]]
            found = torch.empty((), dtype=meta.dtype, device=meta.device).expand(meta.shape)
        return found.detach()

    def output(self, x: Any) -> Any:
        """A value that leaves the graph, as one of the surrounding graph."""
        return self._outputs[_edge(x)] if _has_graph(x) else x


def _may_be_shared(node: Any) -> bool:
    """True for a leaf's node, and for a cast of a leaf, which autocast caches for all threads."""
    kind: Any = type(node)
    return kind is AccumulateGrad or kind.__name__ == _CAST and type(node.next_functions[0][0]) is AccumulateGrad


_CAST = "ToCopyBackward0"


def _edge(x: Tensor) -> Edge:
    return x.grad_fn, x.output_nr


def _edges(edges: Iterable[Edge]) -> list[GradientEdge]:
    return [GradientEdge(*edge) for edge in edges]


def _has_graph(x: Any) -> bool:
    """True for a tensor with a graph."""
    return isinstance(x, Tensor) and x.grad_fn is not None


def _values(leaves: Sequence[Any], numbers: Numbers) -> list[Tensor]:
    """The tensors with a graph among an output's leaves, and among what numbers consist of."""
    found = [x for x in leaves if _has_graph(x)]
    made = [each for each in numbers.values() if isinstance(each, Number)]
    return found + [term.value for each in made for term in each.terms if _has_graph(term.value)]


def _may_leave(forward: MicrobatchForward, leaves: Sequence[Any], several: bool) -> bool:
    """True if a part of the surrounding graph may return an output's leaves instead of the module's own."""
    own = {id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}
    if not several and len(own) > 1:  # Hooks on one would also get what comes from another.
        return False
    others = [x for x in forward.inputs.values() if id(x) not in own]
    return all([isinstance(x, OPEN) for x in leaves]) and not sharing([*own.values()], others)


def cut(
    run: Run, forwards: Sequence[MicrobatchForward], found: Sequence[Flat], numbers: Sequence[Numbers],
    dry: bool = False, whole: bool = False,
) -> tuple[list[Flat], list[dict[int, Number | Unknown]]]:
    """Cuts the graphs of all microbatches that aren't checkpointed, where possible.

    Args:
        run: the call.
        forwards: those of its microbatches, which are done.
        found: their outputs.
        numbers: what numbers among these consist of.
        dry: whether only to record for the report what would be done.
        whole: whether they are known to stay whole.

    Returns:
        The outputs as values of the surrounding graph, and the same numbers for these.
    """
    copies = {_edge(y): y for _, y in run.copies() if y.grad_fn is not None}
    cuts: list[_Cut | None] = [None] * len(forwards)
    seen: set[Any] = set()
    whole = whole or any([stage.own.computed for stage in run.stages])
    for i, forward in enumerate(forwards):
        if whole or i < run.call.checkpointed:
            continue
        each = _Cut(forward, copies, dry)
        try:
            if forward.odd or not _may_leave(forward, found[i][0], len(forwards) > 1):
                raise _Whole
            each.find(_values(found[i][0], numbers[i]))
        except _Whole:
            whole = True  # A node that keeps it whole may also be another microbatch's.
        else:
            cuts[i] = each
            if not each.pays:  # Nor do the others.
                each.note(pays=False)
                for stage in run.stages:
                    stage.facts.whole = False
                    if not dry:
                        stage.note()
                return list[Flat](found), [{**own} for own in numbers]
        whole = whole or not seen.isdisjoint(each.nodes)
        seen |= each.nodes
    if seen and not whole:  # All at once, since they lead to the same nodes of parameters.
        kept = [x for i in range(min(run.call.checkpointed, len(forwards))) for x in _values(found[i][0], numbers[i])]
        whole = not seen.isdisjoint(reached(map(_edge, kept)).nodes)
    outputs, made = list[Flat](found), [{**each} for each in numbers]
    for stage in run.stages:
        stage.facts.whole = whole
        if whole and not run.call.checkpointed:
            stage.sightings.forget()  # What was seen is outdated.
            stage.facts.noted = None
        elif not whole and not dry:
            stage.note()
    if whole:
        return outputs, made
    for i, one in enumerate(cuts):
        if one is None:
            continue
        one.note()
        if not dry:
            one.join()
            leaves = found[i][0]
            new = [one.output(x) for x in leaves]
            outputs[i] = new, found[i][1]
            known = {id(x): id(y) for x, y in zip(leaves, new)}
            made[i] = {
                known[key]: number.mapped(one.output) if isinstance(number, Number) else number
                for key, number in numbers[i].items()
            }
    return outputs, made
