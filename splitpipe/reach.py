"""Which leaves a stage's graph reaches: those that a pass has not lent are gone backward to in another way."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def leaves(roots: Iterable[Any], ends: type | None = None, kinds: set[type] | None = None) -> list[Tensor]:
    """The leaves below some nodes, each once.

    Args:
        roots: nodes.
        ends: of nodes, which the walk goes no further than.
        kinds: gets the classes of the nodes.
    """
    found: list[Tensor] = []
    seen = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind is _AccumulateGrad:
            found.append(node.variable)
        elif kind is not ends:
            stack += [following for following, _ in node.next_functions]
    if kinds is not None:
        kinds.update(map(type, seen))
    return found
