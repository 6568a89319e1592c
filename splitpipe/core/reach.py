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
        others: whether a node on the way is not one of the given numbers.
    """

    leaves: list[Tensor]
    ends: list[Edge]
    others: bool


def reached(roots: Iterable[Edge], ends: Container[Edge] = (), numbers: Container[int] = range(2**64)) -> Reached:
    """Walks a graph, to its leaves and to some edges.

    Args:
        roots: where to start.
        ends: where to stop.
        numbers: sequence numbers of the nodes that were made together.
    """
    leaves: list[Tensor] = []
    stopped: list[Edge] = []
    others = False
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
        others = others or node._sequence_nr() not in numbers
        stack += node.next_functions
    return Reached(leaves, stopped, others)
