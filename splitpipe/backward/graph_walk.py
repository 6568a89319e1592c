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

from splitpipe.backward.rules import RULES, STAND_INS, AccumulateGrad, WeightNode


class Walk(NamedTuple):
    """What a walk has reached."""

    weight_nodes: dict[Any, WeightNode]  #: By autograd's node.
    stand_ins: dict[Any, WeightNode]  #: Gradients also flow through them, so their weights are among the leaves.
    leaves: list[Tensor]

    def parameters(self) -> dict[int, Tensor]:
        """All leaves that the graph leads to, by identity."""
        reached = {id(x): x for own in self.weight_nodes.values() for x in own.weights if x is not None}
        reached.update({id(x): x for x in self.leaves})
        return reached

    def fused(self) -> Walk:
        """The same graph, but B computes all gradients."""
        return Walk({}, {}, [*self.parameters().values()])


def walk(roots: Iterable[GradientEdge], ends: Collection[Any], split: bool) -> Walk:
    """Walks from the roots to leaves, and to the nodes ``ends``.

    ``split``: whether weight gradients may wait; otherwise, every leaf is B's.
    """
    weight_nodes: dict[Any, WeightNode] = {}
    stand_ins: dict[Any, WeightNode] = {}
    leaves: dict[int, Tensor] = {}
    seen = {None, *ends}
    stack: list[Any] = [edge.node for edge in roots]
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
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
                (stand_ins if kind is STAND_INS else weight_nodes)[node] = found
                edges = edges[behind]
        stack += [after for after, _ in edges]
    # Autograd computes all of the gradient of a leaf that B asks for, through weight nodes, too.
    for node, own in [*weight_nodes.items()]:
        if any([id(x) in leaves for x in own.weights]):
            own.weights = tuple([None if id(x) in leaves else x for x in own.weights])
            if not any([x is not None for x in own.weights]):
                del weight_nodes[node]
    return Walk(weight_nodes, stand_ins, [*leaves.values()])
