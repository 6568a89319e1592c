"""Layers that differentiate inside their forward, by weights whose gradients a schedule defers.

Calls of split functions lead to their weights where a stash flushes. In a schedule they end at a phony, and W adds to
the stage's sums: asked for by a layer, such a gradient would be none, or would come scaled with the loss.
"""
from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.graph import reached
from splitpipe.deferral.catch import Split
from splitpipe.deferral.pending import WeightGroup

_SPLIT: Any = Split._backward_cls

#: What goes backward, with its arguments: where it starts, and what it is to reach (None: all).
ASKS: dict[Any, tuple[str, str]] = {
    torch.autograd.grad: ("outputs", "inputs"),
    torch.autograd.backward: ("tensors", "inputs"),
    Tensor.backward: ("self", "inputs"),
}


def verify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a RuntimeError for what ends at a phony, where it is to reach a weight behind it."""
    given = signature(func).bind(*args, **kwargs).arguments
    outputs, inputs = (given.get(name) for name in ASKS[func])
    asked = None if inputs is None else {id(x if x._base is None else x._base) for x in _tensors(inputs)}
    for node in reached((x.grad_fn, 0) for x in _tensors(outputs)).nodes:
        if not isinstance(node, _SPLIT) or node.origin.store.reaches_weights:
            continue
        group: WeightGroup = node.group
        if asked is None or not asked.isdisjoint(map(id, group.parameters)):
            raise RuntimeError(
                f"a layer goes backward inside its own forward, to the gradient of {group}, which a schedule computes "
                "after its own backward: expected SplitPipe(..., backward='autograd') with such a layer."
            )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value
    return [x for x in values if isinstance(x, Tensor)]
