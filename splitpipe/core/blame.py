"""Exceptions of a layer's own backward, noted with the stage, layer and microbatch that they come from.

Autograd calls a Python function's backward by the ``apply`` of its node, and looks it up on the node itself. So the
note is added around that call, where the exception passes; nothing of ours stands between it and the user's
``loss.backward()``. Nodes in C++ have no such place: their errors pass without a note.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from splitpipe.core.note import add_note


def nodes(value: object) -> list[Any]:
    """The nodes that made the tensors of a value."""
    with torch._C.DisableTorchFunction():  # Function modes see who asks for an attribute.
        return [x.grad_fn for x in tree_leaves(value) if isinstance(x, Tensor) and x.grad_fn is not None]


def watch(start: Iterable[Any], layers: Sequence[tuple[str, list[Any]]]) -> bool:
    """Has the Python nodes of each layer note where they are; False if there is none.

    Args:
        start: nodes of the stage's input, where the walk ends.
        layers: a note and the nodes of the output of each layer, first layer first.
    """
    seen = set(start)
    found = False
    for text, stack in layers:
        stack = list(stack)
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.extend(_following(node))
            if isinstance(node, BackwardCFunction) and not _notes_itself(node):
                _note(node, text)
                found = True
    return found


def _following(node: Any) -> list[Any]:
    """The nodes behind one; none if the tensors that it made are gone, and it with them."""
    try:
        return [following for following, _ in node.next_functions]
    except RuntimeError:  # Before torch 2.13 a Python function's node does not live on by its Python object.
        return []


def _notes_itself(node: Any) -> bool:
    return getattr(node._forward_cls, "notes_itself", False)


def _note(node: Any, text: str) -> None:
    own = weakref.ref(node)  # A strong reference would be a cycle, and keep the graph until the collector comes.

    def apply(*grads: Any) -> Any:
        running = own()
        assert running is not None
        try:
            return type(running).apply(running, *grads)
        except BaseException as error:
            add_note(error, text)
            raise

    node.apply = apply
