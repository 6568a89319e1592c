"""What a stage's graph leads to: its leaves, and the edges where it is to end."""
from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

#: A node, and the number of one of its outputs.
Edge = tuple[Any, int]


class Reached(NamedTuple):
    """What some edges lead to.

    Attributes:
        leaves: each once.
        ends: edges that the walk has stopped at.
        older: whether a node on the way is older than the given one.
    """

    leaves: list[Tensor]
    ends: list[Edge]
    older: bool


def reached(roots: Iterable[Edge], ends: Container[Edge] = (), oldest: int = 0) -> Reached:
    """Walks a graph, to its leaves and to some edges.

    Args:
        roots: where to start.
        ends: where to stop.
        oldest: sequence number of the first node that belongs to the graph.
    """
    leaves: list[Tensor] = []
    stopped: list[Edge] = []
    older = False
    seen = set()
    stack = list(roots)
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None or node in seen:
            continue
        if edge in ends:
            stopped.append(edge)
            continue
        seen.add(node)
        if type(node) is _AccumulateGrad:
            leaves.append(node.variable)
            continue
        older = older or node._sequence_nr() < oldest
        stack += node.next_functions
    return Reached(leaves, stopped, older)
