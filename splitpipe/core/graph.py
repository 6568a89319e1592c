"""The autograd graph: its order (sequence numbers), and its leaves.

Of the ready nodes, a device runs the one with the highest sequence number first in backward. Autograd counts per
thread, so numbers of different threads don't determine an order. Nodes that must run first, last or in turn, across the
threads of a pipeline, get their numbers here. This only affects the order on the host: gradients are right in any
order.
"""
from __future__ import annotations

from collections.abc import Container, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from splitpipe.core.thread_state import unobserved
from splitpipe.core.torch_private import AccumulateGrad, _get_sequence_nr


class Identity(Function):
    """The tensor, as a node's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class Enter(Identity):
    """The tensor, as a node's output. B captures the gradient that arrives here; the node itself never runs."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> None:
        if grad is None:
            return
        raise RuntimeError(
            "a gradient arrived at a stage's input on a path that the pipeline doesn't know, and earlier stages would "
            "lose it. Something ran backward through a tensor from inside, such as a loss that a layer keeps, or code "
            "between blocks passed an earlier stage's tensor to an autograd.Function, which belongs into a block. "
            "Expected every term of the loss in the model's output or in loss_fn(output, target), layers that "
            "don't call backward(), and, between stages, tensors in nestings of tuple, list, dict or namedtuple, not "
            "inside other objects; or, without a schedule, backward='autograd'."
        )


class Cross(Identity):
    """The tensor in the part of the graph that another stage makes."""


#: Without the check whether torch.func is active, which takes longer: no pipeline runs inside it.
_enter: Any = super(Function, Enter).apply


def cross(x: Tensor, ranked: bool = True) -> Tensor:
    """The tensor for a stage that didn't make it, on the same device; ``ranked``: its gradient goes first."""
    y: Tensor = Cross.apply(x)
    if ranked:
        rank(y, FIRST)
    return y


def enter(x: Tensor) -> Tensor:
    """The tensor as it enters a graph that belongs to a single stage."""
    y: Tensor = _enter(x)
    return y


def unleaf(x: Tensor) -> Tensor:
    """The leaf as the output of a node, so that a layer may write to it in place, as to another layer's output."""
    y: Tensor = Identity.apply(x)
    return y


#: For a gradient that can be sent to another device, before its own device gets more to do.
FIRST = 2**62
LAST = 0


def rank(x: Tensor, number: int) -> None:
    """Sets the sequence number of the tensor's node."""
    node: Any = x.grad_fn
    node._set_sequence_nr(number)


def rank_of(x: Tensor) -> int:
    """The sequence number of the tensor's node; 0 for a leaf, which has none."""
    return 0 if x.grad_fn is None else x.grad_fn._sequence_nr()


#: A reshape, which depends on the tensor's memory layout, and so on whether it is a copy; and a cast, which autocast
#: makes or has in its cache: all threads of the process share one, and each may clear it.
_RESHAPES = frozenset(
    f"{name}Backward0" for name in ("View", "ReshapeAlias", "UnsafeView", "Clone", "Alias", "ToCopy")
)


@lru_cache
def _does_nothing(kind: Any) -> bool:
    return kind.__name__ in _RESHAPES or issubclass(getattr(kind, "_forward_cls", object), Identity)


def pairs_of(edges: Iterable[GradientEdge]) -> list[Edge]:
    """Edges as pairs, which compare equal if they are the same."""
    return [(edge.node, edge.output_nr) for edge in edges]


class CompiledKind:
    """Represents the nodes of compiled code."""


def kind_of(node: Any) -> Any:
    """The class of a node; one for all compiled code, since the compiler may use another graph the second time."""
    kind: Any = type(node)
    return kind if kind.__name__ != "CompiledFunctionBackward" else CompiledKind


def kinds_of(roots: Iterable[Edge], ends: Container[Edge]) -> list[Any]:
    """The kinds of a graph's nodes between these edges, in the order of a walk: equal for two runs of the same code.

    Nodes that compute nothing are left out: a pending input waits, but only the first time.
    """
    kinds: list[Any] = []
    seen = set()
    stack = list(roots)
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None or node in seen or edge in ends:
            continue
        seen.add(node)
        kind: Any = type(node)
        if not _does_nothing(kind):
            kinds.append(kind_of(node))
        stack += node.next_functions
    return kinds


def leading(roots: Iterable[Edge], ends: Container[Edge]) -> set[Any]:
    """The nodes between these edges: those that a backward to ``ends`` runs through."""
    above: dict[Any, list[Any]] = {}
    found: list[Any] = []
    seen = set()
    stack = [node for node, _ in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for edge in node.next_functions:
            if edge in ends:
                found.append(node)
            elif edge[0] is not None:
                above.setdefault(edge[0], []).append(node)
                stack.append(edge[0])
    leading: set[Any] = set()
    while found:
        node = found.pop()
        if node not in leading:
            leading.add(node)
            found += above.get(node, ())
    return leading


def reserve(count: int) -> None:
    """Advances this thread's sequence counter to ``count`` by making throw-away nodes, once per thread."""
    if _get_sequence_nr() < count:
        # In inference mode, or in a caller's mode that runs ops without grad, no nodes would be made: an endless loop.
        with unobserved(), torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(0, device="cpu", requires_grad=True)
            while _get_sequence_nr() < count:
                x.view(0)


#: A node, and the number of one of its outputs.
Edge = tuple[Any, int]


class Reached(NamedTuple):
    """The result of a walk from some edges."""

    leaves: list[Tensor]
    ends: list[Edge]  # Edges at which the walk stopped.
    others: bool  # True if a node on the way has none of the given numbers.
    nodes: set[Any]


def reached(roots: Iterable[Edge], ends: Container[Edge] = (), numbers: Container[int] | None = None) -> Reached:
    """Walks a graph from the roots to its leaves, or to ``ends``; ``numbers``: those of one forward's nodes."""
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
        if type(node) is AccumulateGrad:
            leaves.append(node.variable)
            continue
        others = others or numbers is not None and node._sequence_nr() not in numbers
        stack += node.next_functions
    return Reached(leaves, stopped, others, seen)
