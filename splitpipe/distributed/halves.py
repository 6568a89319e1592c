"""Backward in two halves as torch.distributed.pipelining has it, where that is right; else in one.

Torch finds the weights of a stage where their ways meet those of inputs that require grad, and leaves out all others:
a stage behind frozen layers would get no gradient, nor would weights that an output of their own comes from. So it is
looked at first: where something would be left out, B does all, and W nothing. W goes through AccumulateGrad, so that
hooks fire, and no gradient is another one's memory.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.distributed.torch_private import _get_grad_fn_or_grad_acc


def _node(x: Tensor) -> Any:
    return _get_grad_fn_or_grad_acc(x)


def _walked(root: Any, starts: Collection[Any]) -> tuple[dict[Any, Tensor], bool]:
    """The leaves that an output comes from, by node, without the inputs; and whether it comes from an input, too."""
    leaves: dict[Any, Tensor] = {}
    met = False
    seen = {root}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in starts:
            met = True
            continue
        following = node.next_functions
        if not following and hasattr(node, "variable"):
            leaves[node] = node.variable
        for other, _ in following:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return leaves, met


def separable(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor] | None:
    """The leaves whose gradients torch would find again after the inputs': all of them, or None.

    It goes from a leaf up to where an input's way comes in. On the way to an output that comes from no input, there is
    no such place.
    """
    starts = {_node(x) for x in inputs if isinstance(x, Tensor) and x.requires_grad}
    found: dict[Any, Tensor] = {}
    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            leaves, met = _walked(_node(x), starts)
            if leaves and not met:
                return None
            found.update(leaves)
    return list(found.values())


def weights(groups: Sequence[dict[str, Any]]) -> None:
    """W: the gradients of the leaves, from where B has left off."""
    # A leaf that is used twice has its way lead through what is between, of which other groups have need as well.
    for group in sorted(groups, key=lambda group: len(group["intermediates"]) == 1):
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
            # Hooks of tensors have changed it in B, and one node may lie behind another: neither is to do so again.
            handles.append(node.register_prehook(lambda _, given=given: given))
        try:
            if edges:
                leaves = [node.variable for node in group["params"]]
                torch.autograd.backward(edges, grads, retain_graph=len(group["intermediates"]) > 1, inputs=leaves)
        finally:
            for handle in handles:
                handle.remove()
        group.clear()
