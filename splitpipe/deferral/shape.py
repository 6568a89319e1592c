"""The shape of one microbatch's graph, to recognise that of another one without looking at each node again.

The graphs that microbatches make on one stage, in all steps, usually have the same nodes in the same places, leading to
the same leaves. Then the owners of weights are in the same places, too, and a survey (``owners``) of the first graph is
one of the others. A graph of another shape is surveyed itself, so a wrong guess costs only time.

A shape outlives the step, and knows leaves by their identities alone. If a later leaf has the identity of one that is
gone, it has it at all of that one's places, and what W needs to know about it is found anew in each call. A weak
reference would keep torch from swapping the leaf, and if Python alone kept a leaf's node, a forward would wait for the
interpreter's lock inside torch's lock of that leaf, while another thread may wait for the latter with the former.
"""
from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core.graph import Edge
from splitpipe.core.torch_private import AccumulateGrad
from splitpipe.deferral.owners import Survey


class Ends(Protocol):
    """The edges at which a graph ends."""

    def __contains__(self, edge: Any) -> bool:
        """True for such an edge."""

    def within(self, nodes: Sequence[Any], tails: Sequence[Any]) -> bool:
        """True if these nodes belong to the graph, and none is at its end; ``tails``: nodes from owners to weights."""


class Entered:
    """The edges at which a stage's inputs enter, and the sequence numbers of the nodes that its forward has made."""

    def __init__(self, edges: Iterable[Edge], numbers: Container[int]) -> None:
        self._edges = {*edges}
        self._numbers = numbers

    def __contains__(self, edge: Any) -> bool:
        return edge in self._edges

    def within(self, nodes: Sequence[Any], tails: Sequence[Any]) -> bool:
        """True if this forward has made all nodes but those of tails, and none is an input's."""
        numbers = self._numbers
        if not all([node._sequence_nr() in numbers for node in nodes]):
            return False
        return {node for node, _ in self._edges}.isdisjoint(nodes)


class _Tail(NamedTuple):
    """An edge from an owner to a leaf, through nodes of these kinds."""

    kinds: tuple[Any, ...]
    leaf: int


class _Leaf(NamedTuple):
    """An edge to a leaf, and its place among the leaves whose gradients B computes."""

    leaf: int
    place: int


class _End:
    """An edge at which the graph ends."""


#: What an edge leads to: the node with a number, nothing, or one of the above.
_Link = Any


class Shape:
    """The places of nodes and leaves in a graph, numbered in the order of a walk."""

    def __init__(self, roots: Sequence[Edge], ends: Ends, found: Survey) -> None:
        self._kinds: list[Any] = []
        self._links: list[list[_Link]] = []
        owners = {owner.node: owner for owner in found.owners}
        places = {id(leaf): place for place, leaf in enumerate(found.leaves)}
        self._count = len(places)
        numbers: dict[Any, int] = {}
        nodes: list[Any] = []

        def link(edge: Edge) -> _Link:
            node = edge[0]
            if node is None:
                return None
            if edge in ends:
                return _End
            if type(node) is AccumulateGrad:
                return _Leaf(id(node.variable), places[id(node.variable)])
            if node not in numbers:
                numbers[node] = len(nodes)
                nodes.append(node)
            return numbers[node]

        self._roots = [link(edge) for edge in roots]
        self._owners: list[tuple[int, list[int]]] = []  # With the numbers of the edges that lead to weights.
        for node in nodes:  # It grows.
            own = owners.get(node)
            tails = () if own is None else own.edges
            self._kinds.append(type(node))
            after = enumerate(node.next_functions)
            self._links.append([_tail(edge) if k in tails else link(edge) for k, edge in after])
            if own is not None:
                self._owners.append((numbers[node], own.edges))

    @staticmethod
    def known(found: Survey) -> bool:
        """True if a graph of the same shape has the same owners."""
        return not found.others and all([owner.way is not None for owner in found.owners])

    def match(
        self, roots: Sequence[Edge], ends: Ends
    ) -> tuple[list[tuple[Any, list[int]]], list[Tensor], list[GradientEdge]] | None:
        """The nodes that own weights in a graph with these roots, with the edges to them, and the other leaves' edges.

        None if it has another shape.
        """
        nodes: list[Any] = []
        tails: list[Any] = []
        edges: list[Any] = [None] * self._count
        if not _same(roots, self._roots, nodes, tails, edges, ends):
            return None
        for node, kind, links in zip(nodes, self._kinds, self._links):  # The nodes grow.
            if type(node) is not kind or not _same(node.next_functions, links, nodes, tails, edges, ends):
                return None
        if len({*nodes}) < len(self._kinds) or not ends.within(nodes, tails):
            return None
        leaves = [node.variable for node in edges]
        found = [(nodes[number], own) for number, own in self._owners]
        return found, leaves, [GradientEdge(node, 0) for node in edges]


def _same(
    after: Sequence[Edge], links: Sequence[_Link], nodes: list[Any], tails: list[Any], leaves: list[Any], ends: Ends
) -> bool:
    """True if edges lead where they should; adds the nodes that are reached for the first time, of tails and leaves."""
    if len(after) != len(links):
        return False
    for edge, link in zip(after, links):
        node = edge[0]
        kind = type(link)
        if kind is int:
            if link == len(nodes):
                nodes.append(node)
            elif nodes[link] is not node:
                return False
        elif kind is _Tail:
            for expected in link.kinds:
                if type(node) is not expected:
                    return False
                tails.append(node)
                ((node, _),) = node.next_functions
            if type(node) is not AccumulateGrad or id(node.variable) != link.leaf:
                return False
        elif kind is _Leaf:
            if type(node) is not AccumulateGrad or id(node.variable) != link.leaf:
                return False
            leaves[link.place] = node
        elif link is _End:
            if node is None or edge not in ends:
                return False
        elif node is not link:
            return False
    return True


def _tail(edge: Edge) -> _Tail:
    node, kinds = edge[0], list[Any]()
    while type(node) is not AccumulateGrad:
        kinds.append(type(node))
        ((node, _),) = node.next_functions
    return _Tail(tuple(kinds), id(node.variable))
