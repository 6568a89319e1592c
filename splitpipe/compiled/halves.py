"""A backward graph of AOTAutograd, split in two: input gradients (B), and weight gradients from what B leaves (W).

Both are separated by torch's own partitioner, which treats the first half as a forward and the second as its backward:
it looks for the cut that keeps the fewest bytes, and makes the second half recompute what is cheap. W computes the
weight gradients of one call, or of several microbatches together.
"""
from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import Parameter

from splitpipe.backward.graph_walk import total_version
from splitpipe.backward.stand_ins import leftovers_of, stand_ins
from splitpipe.backward.weight_gradients import Total
from splitpipe.core.torch_private import _current_autograd_node

#: Takes a graph's arguments in a list, which it may empty.
Compiled = Callable[[list[Any]], Sequence[Any]]
aten = torch.ops.aten

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
    weights: tuple[int, ...]  # Which ones W returns.


def halved(whole: GraphModule, weights: Collection[int], given: Sequence[Any] | None = None) -> Halves | None:
    """Splits a backward graph of functional ATen ops, which isn't changed; None if it computes no weight gradient.

    ``weights``: which of its outputs are gradients of weights; ``given``: example inputs, if their layout differs from
    that at tracing: the compiler of the forward chooses the layout of what it saves.
    """
    from splitpipe.compiled.torch_private import min_cut_partition

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
    nodes = [number for number, x in enumerate(outputs) if isinstance(x, Node)]
    inputs = tuple([number for number in nodes if number not in weights])
    deferred = tuple([number for number in nodes if number in weights])
    if not deferred:
        return None
    output.args = (tuple([outputs[number] for number in inputs + deferred]),)
    output.meta.pop("desc", None)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _keep_for_weights(graph.graph, [outputs[number] for number in inputs])
    if not inputs:
        return Halves(None, graph, (), deferred)
    first, second = min_cut_partition(
        graph, _values(graph), num_fwd_outputs=len(inputs), static_lifetime_input_indices=[]
    )
    _in_order(first, second, len(inputs))
    return Halves(first, second, inputs, deferred)


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


def _hint(number: Any) -> int:
    return number if isinstance(number, int) else int(number.node.hint or 4096)


def _values(graph: GraphModule, strides: Sequence[tuple[int, ...] | None] = ()) -> list[Any]:
    """A graph's arguments, as examples, with strides where these are known."""
    found = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return [
        x if stride is None or not isinstance(x, Tensor) or tuple(map(_hint, x.stride())) == stride
        else x.as_strided(x.size(), stride)
        for x, stride in zip_longest(found, strides)
    ]


class Leftover:
    """What one call's first half leaves: the arguments of the second, without their graphs."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.arguments = [x.detach() if isinstance(x, Tensor) else x for x in given]
        self.saved_for_weight = [x for x in self.arguments if isinstance(x, Tensor)]


class TracedGraph:
    """A traced graph, whose second half W uses like a SplitFunction of the weights among its arguments."""

    __name__ = "compiled"

    def __init__(self, examples: Sequence[Any], split: bool) -> None:
        self._count, self._split = len(examples), split
        #: The shapes of its weights, by which of the arguments they are.
        self._weights = {k: x.shape for k, x in enumerate(examples) if isinstance(x, Parameter) and x.requires_grad}
        self._halves: Halves | None = None
        self._first: Compiled | None = None
        self._second: Any = None

    def call(self, compiled: Callable[..., Any], *args: Any) -> Any:
        """Calls the compiled forward."""
        if self._halves is not None:  # The first call knows: the backward is compiled with the forward.
            own = dict(zip(self._weights, stand_ins(self, [args[k] for k in self._weights])))
            args = tuple([own.get(k, x) for k, x in enumerate(args)])
        return compiled(*args)

    def backward(
        self, whole: GraphModule, given: Sequence[Any], compile: Callable[[GraphModule, Sequence[Any]], Any]
    ) -> Compiled | None:
        """Compiles a backward in two halves; None if it must stay whole."""
        from splitpipe.compiled.torch_private import TracingContext

        # It writes to none of its arguments: W or another backward may need them.
        metadata: Any = TracingContext.get().fw_metadata
        metadata.bw_donated_idxs = []
        # With a checkpoint inside, it draws the forward's random numbers again, in the order of the whole.
        if not self._split or any("rng_state" in str(node.target) for node in whole.graph.nodes):
            return None
        outputs: Any = whole.graph.output_node().args[0]
        as_given = len(outputs) == self._count and all(
            not isinstance(outputs[k], Node) or outputs[k].meta["val"].shape == shape
            for k, shape in self._weights.items()
        )
        # Otherwise, AOTAutograd has replaced the given inputs.
        found = halved(whole, self._weights, given) if as_given else None
        if found is None:
            return None
        strides: Any = None
        if found.first is not None:
            with TracingContext.report_output_strides() as strides:
                self._first = compile(found.first, _values(found.first))
        self._second = compile(found.second, _values(found.second, (strides or [])[len(found.inputs):]))
        self._halves = found
        return boxed(lambda given: self._backward(given))

    def _backward(self, given: list[Any]) -> list[Any]:
        assert self._halves is not None
        gradients: list[Any] = [None] * self._count
        rest = list(given)
        given.clear()
        if self._first is not None:
            made = list(self._first(rest))
            inputs = self._halves.inputs
            for number, gradient in zip(inputs, made):
                gradients[number] = gradient
            rest = made[len(inputs):]
            del made
        leftovers = leftovers_of(_current_autograd_node(), self)
        if leftovers is not None:
            left = Leftover(rest)
            leftovers.append((left, None, total_version(left.saved_for_weight)))
        else:
            for number, gradient in self._weight_gradients(rest):
                gradients[number] = gradient
        return gradients

    def accumulate(self, totals: Sequence[Total | None], parts: Sequence[tuple[Leftover, Any]]) -> None:
        """Adds the weight gradients of several calls."""
        total_of = dict(zip(self._weights, totals))
        for leftover, _ in parts:
            for number, gradient in self._weight_gradients([*leftover.arguments]):
                if (total := total_of[number]) is not None:
                    total.add(gradient)

    def _weight_gradients(self, given: list[Any]) -> Iterable[tuple[int, Tensor]]:
        """The weight gradients of one call, each with the number of its weight."""
        if torch.is_grad_enabled():  # As in a backward that is differentiated.
            raise RuntimeError(
                "create_graph=True was used in a backward through a compiled layer, but torch's compiler doesn't "
                "support second derivatives: expected SplitPipe(...) without compile=, or layers of another backend."
            )
        assert self._halves is not None
        return zip(self._halves.weights, self._second(given))


def boxed(function: Any) -> Compiled:
    """Marks a function that takes its arguments in a list, and may empty it, so that their memory is freed."""
    function._boxed_call = True
    compiled: Compiled = function
    return compiled
