"""One flat walk through the graph of a microbatch on a stage: nodes whose weight gradients may wait, and other leaves.

    roots ──> ... ──> AddmmBackward0 ──┬──> ... ──> guard          B goes on to the stage's inputs
                                       └──> weight, bias           W computes these, from what the node has saved
    roots ──> ... ──> MulBackward0 ────┬──> ...
                                       └──> scale                  a leaf: B computes its gradient

A node is told by its type (see ``rules``). To look a graph up in a cache by its shape takes longer than this walk,
which takes about a third of the layers' own time on the host.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.backward.rules import RULES, AccumulateGrad, WeightNode


class Walk(NamedTuple):
    """What a walk has reached."""

    weight_nodes: list[WeightNode]
    leaves: list[Tensor]

    def parameters(self) -> dict[int, Tensor]:
        """All leaves that the graph leads to, by identity."""
        reached = {id(x): x for node in self.weight_nodes for x in node.weights if x is not None}
        reached.update({id(x): x for x in self.leaves})
        return reached


def walk(roots: Iterable[GradientEdge], ends: Collection[Any], split: bool) -> Walk:
    """Walks from the roots to leaves, and to the nodes ``ends``.

    ``split``: whether weight gradients may wait; otherwise, every leaf is B's.
    """
    weight_nodes: list[WeightNode] = []
    leaves: dict[int, Tensor] = {}
    seen = set(ends)
    stack: list[Any] = [x for x in dict.fromkeys([edge.node for edge in roots]) if x not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is AccumulateGrad:
            x = node.variable
            leaves[id(x)] = x
            continue
        edges = node.next_functions
        if split and kind in RULES:
            rule, behind = RULES[kind]
            try:
                found = rule(node, edges)
            except (AttributeError, RuntimeError):  # This version of torch saves other things, or they have changed.
                found = None  # It is left to autograd, which also raises for what was written to.
            if found is not None:
                weight_nodes.append(found)
                edges = edges[behind]
                if found.whole:
                    node.leftovers = []
        for after, _ in edges:
            if after is not None and after not in seen:
                seen.add(after)
                stack.append(after)
    # A node that gives all of its weights up makes leaves of them.
    while not leaves.keys().isdisjoint([id(x) for node in weight_nodes if not node.partial for x in node.weights]):
        weight_nodes = [node for node in weight_nodes if _keeps_weights(node, leaves)]
    return Walk(weight_nodes, [*leaves.values()])


def fused(graph: Walk) -> Walk:
    """The same graph, but B computes all gradients."""
    for weight_node in graph.weight_nodes:
        if weight_node.whole:
            weight_node.node.leftovers = None
    return Walk([], [*graph.parameters().values()])


def _keeps_weights(weight_node: WeightNode, leaves: dict[int, Tensor]) -> bool:
    """Drops the weights that the walk has reached another way, too; False if none is left.

    Autograd computes all of the gradient of a leaf that B asks for, through this node, too.
    """
    weights = weight_node.weights
    if weight_node.partial or not any([x is not None and id(x) in leaves for x in weights]):
        return True
    if weight_node.whole:
        weight_node.node.leftovers = None
        leaves.update({id(x): x for x in weights if x is not None})
        return False
    weight_node.weights = tuple([None if x is None or id(x) in leaves else x for x in weights])
    return any([x is not None for x in weight_node.weights])
