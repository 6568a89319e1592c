"""A backward graph of AOTAutograd, split in two: input gradients (B), and weight gradients from what B leaves (W).

Both are separated by torch's own partitioner, which treats the first half as a forward and the second as its backward:
it looks for the cut that keeps the fewest bytes, and makes the second half recompute what is cheap.

Products of two matrices, which most weight gradients are, aren't compiled: W adds them to its sums in place, those of
several microbatches in one call (see ``products``).
"""
from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

#: Ops that compute nothing.
_VIEWS = frozenset([
    f"aten.{name}" for name in
    "permute.default t.default transpose.int view.default reshape.default _unsafe_view.default expand.default "
    "unsqueeze.default squeeze.dim squeeze.default slice.Tensor select.int alias.default detach.default".split()
])
#: Slow ops: computed in B, their small results would be fewer bytes to keep, and W would have nothing to do.
_LONG = frozenset([
    f"aten.{name}" for name in
    "mm.default bmm.default addmm.default baddbmm.default convolution.default convolution_backward.default "
    "embedding_dense_backward.default index_put.default _unsafe_index_put.default scatter_add.default "
    "scatter_reduce.two index_add.default _trilinear.default mkldnn_rnn_layer_backward.default".split()
])
#: The part of a node's meta from which partitioners know where it belongs.
_TAGS = ("partitioner_tag", "recompute", "ac_graph_id", "must_be_in_backward")


class Halves(NamedTuple):
    """Two graphs. The first returns the gradients of ``inputs``, followed by the second graph's arguments."""

    first: GraphModule | None  # B; None if no input needs a gradient: then W gets all of the backward's arguments.
    second: GraphModule  # W.
    inputs: tuple[int, ...]  # Which of the whole graph's outputs B returns.
    # For each weight gradient, which output of the whole graph it is, and from which outputs of W it is made: a single
    # one; or two matrices, the first one's transpose times the second.
    weights: tuple[tuple[int, tuple[int, ...]], ...]


def halved(whole: GraphModule, weights: Collection[int], given: Sequence[Any] | None = None) -> Halves | None:
    """Splits a backward graph of functional ATen ops, which isn't changed; None if it computes no weight gradient.

    ``weights``: which of its outputs are gradients of weights; ``given``: example inputs, if their layout differs from
    that at tracing: the compiler of the forward chooses the layout of what it saves.
    """
    graph = copy.deepcopy(whole)
    for node in graph.graph.nodes:
        for tag in _TAGS:
            node.meta.pop(tag, None)
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), given or ()):
        node.meta["val"] = example
    _untangle(graph.graph)
    _part(graph.graph)
    output = graph.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    deferred = [number for number in sorted(weights) if isinstance(outputs[number], Node)]
    if not deferred:
        return None
    inputs = tuple([number for number, x in enumerate(outputs) if isinstance(x, Node) and number not in weights])
    made: list[Node] = []
    kinds: list[tuple[int, tuple[int, ...]]] = []
    for number in deferred:
        found = _product(outputs[number])
        given = (outputs[number],) if found is None else found
        kinds.append((number, tuple(range(len(made), len(made) + len(given)))))
        made += given
    output.args = (tuple([outputs[number] for number in inputs] + made),)
    output.meta.pop("desc", None)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _keep_for_weights(graph.graph, [outputs[number] for number in inputs])
    if not inputs:
        return Halves(None, graph, (), tuple(kinds))
    first, second = _cut(graph, len(inputs))
    _in_order(first, second, len(inputs))
    return Halves(first, second, inputs, tuple(kinds))


def bytes_given(graph: GraphModule) -> int:
    """The bytes of a graph's arguments, according to the example inputs: of the second half, what lives from B to W."""
    return sum(map(_bytes, graph.graph.find_nodes(op="placeholder")))


def only_views(graph: GraphModule) -> bool:
    """True if a graph computes nothing."""
    return all(node.op != "call_function" or str(node.target) in _VIEWS for node in graph.graph.nodes)


def _cut(graph: GraphModule, inputs: int) -> tuple[GraphModule, GraphModule]:
    from splitpipe.compiled.torch_private import default_partition, min_cut_partition

    examples = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    found = [
        cut(copy.deepcopy(graph), examples, num_fwd_outputs=inputs, static_lifetime_input_indices=[])
        for cut in (default_partition, min_cut_partition)
    ]
    return min(found, key=lambda parts: bytes_given(parts[1]))


def _keep_for_weights(graph: Graph, inputs: Sequence[Node]) -> None:
    """Moves slow ops that no input's gradient needs into the second half."""
    needed, left = set[Node](), list(inputs)
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    for node in graph.nodes:
        if node not in needed and str(node.target) in _LONG:
            node.meta["partitioner_tag"] = "must_be_in_backward"


def _in_order(first: GraphModule, second: GraphModule, inputs: int) -> None:
    """Makes the first half return what it leaves in the order in which the second one takes it."""
    output = first.graph.output_node()
    outputs: Any = output.args[0]
    left = {node.name: node for node in outputs[inputs:]}
    output.args = ((*outputs[:inputs], *[left[node.name] for node in second.graph.find_nodes(op="placeholder")]),)
    first.recompile()


def _untangle(graph: Graph) -> None:
    """Renames the output gradients so that partitioners don't recognise them, since both halves need them."""
    for node in graph.find_nodes(op="placeholder"):
        if "tangents" in str(node.target):
            with graph.inserting_before(node):
                other = graph.placeholder(f"given_{str(node.target).replace('tangents', 'grad')}")
            other.meta = dict(node.meta)
            node.replace_all_uses_with(other)
            graph.erase_node(node)


def _part(graph: Graph) -> None:
    """Computes the two gradients of a convolution separately, since each half needs one."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        users = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        mask: Any = node.args[-1]
        if 0 not in users or len(users) == 1:
            continue
        with graph.inserting_before(node):
            for wanted, numbers in (([mask[0], False, False], [0]), ([False, *mask[1:]], [1, 2])):
                half = graph.call_function(node.target, (*node.args[:-1], wanted))
                half.meta = {**node.meta, "val": tuple([
                    value if want else None for value, want in zip(node.meta["val"], wanted)
                ])}
                for number in numbers:
                    if number in users:
                        users[number].replace_input_with(node, half)


def _product(node: Node) -> tuple[Node, Node] | None:
    """The two matrices of a gradient that is the first one's transpose times the second; None if it isn't a product."""
    turned = False
    while node.op == "call_function":
        if node.target in (aten.permute.default, aten.t.default) and node.meta["val"].dim() == 2:
            turned ^= node.target is aten.t.default or list(cast(Any, node.args[1])) == [1, 0]
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is aten.mm.default:
            left, right = node.args
            assert isinstance(left, Node) and isinstance(right, Node)
            return (right, _transposed(left)) if turned else (_transposed(left), right)
        else:
            return None
    return None


def _transposed(node: Node) -> Node:
    if node.target in (aten.permute.default, aten.t.default) and node.meta["val"].dim() == 2:
        return node.args[0]  # type: ignore[return-value]
    with node.graph.inserting_after(node):
        other = node.graph.call_function(aten.permute.default, (node, [1, 0]))
    other.meta = {**node.meta, "val": node.meta["val"].t()}
    return other


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return _hint(value.numel()) * value.dtype.itemsize


def _hint(number: Any) -> int:
    return number if isinstance(number, int) else int(number.node.hint or 4096)


def values(graph: GraphModule, strides: Sequence[tuple[int, ...] | None] = ()) -> Sequence[Any]:
    """A graph's arguments, as examples, with strides where these are known."""
    found = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return [
        x if stride is None or not isinstance(x, Tensor) or tuple(map(_hint, x.stride())) == stride
        else x.as_strided(x.size(), stride)
        for x, stride in zip_longest(found, strides)
    ]
