"""One flat walk through a microbatch's graph on a stage, and the rules that say which weight gradients may wait.

    roots ──> ... ──> AddmmBackward0 ──┬──> ... ──> guard          B goes on to the stage's inputs
                                       └──> weight, bias           W computes these, from what the node has saved
    roots ──> ... ──> MulBackward0 ────┬──> ...
                                       └──> scale                  a leaf: B computes its gradient

A node is told by its type. Its rule says what W needs of what the node has saved, and which function computes it.
Between a node and its weight there may be transposes and casts only; W knows no gradient of another view, nor of a
computed weight. A node without a rule keeps its whole backward in B, and so does one that its rule doesn't take.

To look a graph up in a cache by its shape takes longer than this walk, which takes about a third of the layers' own
time on the host.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from splitpipe.backward.stand_ins import StandIns
from splitpipe.backward.weight_gradients import Parts, Totals, convolution, embedding, linear

#: Multiplications per microbatch and unit of stride from which on a CPU gains by deferring a convolution's gradients.
_MANY = 2**25


# One object a node, with few references: the garbage collector looks at all of them in every call.
@dataclass(eq=False, slots=True)
class WeightNode:
    """What W needs of a node whose weight gradients it computes: ``accumulate`` gets this as ``ctx``.

    ``way``: how the node uses its weights; calls that use them alike are summed together.
    """

    accumulate: Callable[[Totals, Parts], None]
    weights: tuple[Tensor | None, ...]
    saved_for_weight: tuple[Tensor, ...] = ()
    way: tuple[Any, ...] = ()
    version: int = 0  #: That of what was saved, at the end of F.


def total_version(tensors: Iterable[Tensor | None]) -> int:
    """A number that grows when one of the tensors is written to, unless it is a parameter."""
    total = 0
    for x in tensors:
        if x is not None and type(x) is not Parameter:
            try:
                total += x._version
            except RuntimeError:  # An inference tensor, such as a gradient that the caller has given.
                pass
    return total


class Walk(NamedTuple):
    """What a walk has reached."""

    weight_nodes: dict[Any, WeightNode]  #: By autograd's node.
    stand_ins: dict[Any, WeightNode]  #: Gradients also flow through them, so their weights are among the leaves.
    leaves: list[Tensor]  #: B computes their gradients.
    reached: dict[int, Tensor]  #: All leaves that the graph leads to, by identity.

    def fused(self) -> Walk:
        """The same graph, but B computes all gradients."""
        return Walk({}, {}, [*self.reached.values()], self.reached)


def walk(roots: Iterable[GradientEdge], ends: Collection[Any], split: bool) -> Walk:
    """Walks from the roots to leaves, and to the nodes ``ends``.

    ``split``: whether weight gradients may wait; otherwise, every leaf is B's.
    """
    weight_nodes: dict[Any, WeightNode] = {}
    stand_ins: dict[Any, WeightNode] = {}
    leaves: dict[int, Tensor] = {}
    reached: dict[int, Tensor] = {}
    seen = {None, *ends}
    stack: list[Any] = [edge.node for edge in roots]
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind is AccumulateGrad:
            x = node.variable
            leaves[id(x)] = reached[id(x)] = x
            continue
        edges = node.next_functions
        if split and kind in RULES:
            rule, behind = RULES[kind]
            try:
                found = rule(node, edges)
            except (AttributeError, RuntimeError):  # This version of torch saves other things, or they have changed.
                found = None  # It is left to autograd, which also raises for what was written to.
            if found is not None:
                found.version = total_version(found.saved_for_weight)
                reached.update([(id(x), x) for x in found.weights if x is not None])
                (stand_ins if kind is STAND_INS else weight_nodes)[node] = found
                edges = edges[behind]
        stack += [after for after, _ in edges]
    # Autograd computes all of the gradient of a leaf that B asks for, through weight nodes, too.
    for node, own in [*weight_nodes.items()]:
        if any([id(x) in leaves for x in own.weights]):
            own.weights = tuple([None if id(x) in leaves else x for x in own.weights])
            if not any([x is not None for x in own.weights]):
                del weight_nodes[node]
    return Walk(weight_nodes, stand_ins, [*leaves.values()], reached)


def _type(function: Callable[[Tensor], Tensor]) -> Any:
    """The type of the node that a function makes, whatever torch calls it."""
    with torch.inference_mode(False), torch.enable_grad():
        return type(get_gradient_edge(function(torch.ones(1, 1, device="cpu", requires_grad=True))).node)


#: Whether such a view of a matrix is its transpose. A negative dimension is read as 2**64 more.
_TURNS: dict[Any, Callable[[Any], bool]] = {
    _type(lambda x: x.mT): lambda node: node._saved_dim0 % 2 != node._saved_dim1 % 2,
    _type(lambda x: x.permute(1, 0)): lambda node: node._saved_dims[0] % 2 == 1,
}
_T, _CAST, AccumulateGrad = _type(Tensor.t), _type(lambda x: x.to(torch.cfloat)), _type(lambda x: x)


def unchanged(x: Tensor) -> Tensor:
    """An unpack hook of the planner's, known to return what was saved."""
    return x


def leaf_of(node: Any) -> tuple[Tensor | None, bool]:
    """The leaf behind transposes and casts, if only these are there, and whether it is transposed."""
    turned = viewed = False
    while node is not None:
        kind = type(node)
        if kind is AccumulateGrad:
            leaf = node.variable
            return (None, False) if viewed and leaf.dim() != 2 else (leaf, turned)
        if kind is _T:
            viewed, turned = True, not turned
        elif kind in _TURNS:
            viewed, turned = True, turned != _TURNS[kind](node)
        elif kind is not _CAST:
            break
        node = node.next_functions[0][0]
    return None, False


def _saved(node: Any, raw: Any, name: str, weight: Tensor | None) -> Tensor | None:
    """What a node has saved for its weight's gradient, if both are there and plain."""
    # With another hook, unpacking may take long, or not be allowed twice.
    if weight is None or raw.unpack_hook is not None and raw.unpack_hook is not unchanged:
        return None
    x: Tensor = getattr(node, name)
    plain = type(x) is Tensor and type(weight) in (Tensor, Parameter) and x.layout is weight.layout is torch.strided
    if not plain or weight.is_complex() or x.is_complex():  # A weight may have been cast.
        return None
    return x if x.grad_fn is None else x.detach()  # In W, it would keep the graph alive.


def _addmm(node: Any, edges: Any) -> WeightNode | None:
    (bias, _), _, (weight, _) = edges
    (leaf, turned), (other, _) = leaf_of(weight), leaf_of(bias)
    # A bias with rows, or per row, is summed differently.
    if bias is not None and (other is None or other.dim() > 1) or node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    x = _saved(node, node._raw_saved_mat1, "_saved_mat1", leaf)
    return None if x is None else WeightNode(linear, (leaf, other), (x,), (turned,))


def _mm(node: Any, edges: Any) -> WeightNode | None:
    leaf, turned = leaf_of(edges[1][0])
    x = _saved(node, node._raw_saved_self, "_saved_self", leaf)
    return None if x is None else WeightNode(linear, (leaf, None), (x,), (turned,))


def _convolution(node: Any, edges: Any) -> WeightNode | None:
    _, (weight, _), (bias, _) = edges
    (leaf, _), (other, _) = leaf_of(weight), leaf_of(bias)
    x = _saved(node, node._raw_saved_input, "_saved_input", leaf)
    if leaf is None or x is None or other is None and bias is not None:
        return None
    if x.is_cpu and leaf.numel() * x.numel() < _MANY * x.shape[1]:
        return None
    geometry = (
        node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
        node._saved_output_padding, node._saved_groups,
    )
    used = node._saved_weight  # Its gradient needs the weight's shape and layout; its dtype may be that of autocast.
    return WeightNode(convolution, (leaf, other), (x, used), (geometry, used.dtype))


def _embedding(node: Any, edges: Any) -> WeightNode | None:
    leaf, turned = leaf_of(edges[0][0])
    numbers = _saved(node, node._raw_saved_indices, "_saved_indices", leaf)
    if numbers is None or turned or node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    padding = node._saved_padding_idx
    padding = padding if padding < 2**63 else padding - 2**64  # It is read as an unsigned number.
    return WeightNode(embedding, (leaf,), (numbers,), (node._saved_weight_sym_argsize_0, padding))


def _stand_ins(node: Any, edges: Any) -> WeightNode | None:
    """Stand-ins for weights. As ``ctx``, W gets what their function has left there."""
    found = [leaf_of(after) for after, _ in edges]
    if any([leaf is None or turned for leaf, turned in found]):
        return None
    leaves = iter([leaf for leaf, _ in found])
    weights = tuple([next(leaves) if need else None for need in node.needed])
    return WeightNode(node.function.accumulate, weights)


STAND_INS = StandIns._backward_cls
#: Given a node and its edges, what W needs, unless the node is left to autograd; and the edges that B follows.
RULES: dict[Any, tuple[Callable[[Any, Any], WeightNode | None], slice]] = {
    _type(lambda x: torch.addmm(x, x, x)): (_addmm, slice(1, 2)),
    _type(lambda x: x @ x): (_mm, slice(1)),
    _type(lambda x: torch.conv1d(x[None], x[None])): (_convolution, slice(1)),
    _type(lambda x: torch.embedding(x, torch.zeros(1, dtype=torch.long, device="cpu"))): (_embedding, slice(0)),
    STAND_INS: (_stand_ins, slice(None)),
}
