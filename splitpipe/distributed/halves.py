"""Backward in two halves as torch.distributed.pipelining has it, where that is right; else in one.

Torch finds the weights of a stage where their ways meet those of inputs that require grad, and leaves out all others:
a stage behind frozen layers would get no gradient. Here it is looked at first: where some weight would be left out, B
does all, and W nothing. W goes through AccumulateGrad, so that hooks fire, and no gradient is another one's memory.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import _backward


def _node(x: Tensor) -> Any:
    return _backward._get_grad_fn_or_grad_acc(x)


def _reached(parameters: Collection[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that the outputs come from."""
    seen: set[Any] = set()
    waiting = [_node(x) for x in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return [x for x in parameters if x.requires_grad and _node(x) in seen]


def separable(outputs: Sequence[Any], inputs: Sequence[Any], parameters: Collection[Tensor]) -> bool:
    """Whether torch would find the gradient of every parameter again after the inputs'."""
    ends = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    starts = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    reached = _reached(parameters, ends)
    if not starts or not ends:
        return not reached
    reverse = _backward.construct_reverse_graph([_node(x) for x in ends])
    groups = _backward.get_param_groups([_node(x) for x in starts], [_node(x) for x in reached], reverse)
    found = {node for group in groups for node in group["params"]}
    return len(found) == len(reached)


def weights(groups: Sequence[dict[str, Any]], parameters: Collection[Tensor]) -> None:
    """W: the gradients of the parameters, from where B has left off."""
    by_node = {_node(x): x for x in parameters if x.requires_grad}
    for group in groups:
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        handles = []
        if group.get("grads") is None:
            continue
        for given, node in zip(group["grads"], group["intermediates"]):
            if given is None:
                continue
            for number, grad in enumerate(given):
                if grad is not None:
                    edges.append(GradientEdge(node, number))
                    grads.append(grad)
            if len(group["intermediates"]) > 1:  # One may lie behind another, which is not to add to it again.
                handles.append(node.register_prehook(lambda _, given=given: given))
        try:
            if edges:
                torch.autograd.backward(edges, grads, inputs=[by_node[node] for node in group["params"]])
        finally:
            for handle in handles:
                handle.remove()
        group.clear()
