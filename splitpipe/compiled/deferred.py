"""What is compiled from one traced graph: its backward's halves, of which the second one is W.

W computes the weight gradients of one call, or of several microbatches together.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Parameter

from splitpipe.backward.accumulate import Total
from splitpipe.backward.stand_ins import leave_for_weights, stand_ins
from splitpipe.compiled.halves import Halves, halved, values
from splitpipe.core.torch_private import _current_autograd_node

#: Takes a graph's arguments in a list, which it may empty.
Compiled = Callable[[list[Any]], Sequence[Any]]


class Leftover:
    """What one call's first half leaves: the arguments of the second."""

    __slots__ = ("_others", "saved_for_weight")

    def __init__(self, given: Sequence[Any]) -> None:
        self.saved_for_weight: tuple[Tensor, ...] = tuple([x for x in given if isinstance(x, Tensor)])
        self._others = [(k, x) for k, x in enumerate(given) if not isinstance(x, Tensor)]

    def arguments(self) -> list[Any]:
        """The arguments."""
        found: list[Any] = list(self.saved_for_weight)
        for k, x in self._others:
            found.insert(k, x)
        return found


class TracedGraph:
    """A traced graph, whose second half W uses like a SplitFunction of the weights among its arguments, ``examples``.

    ``split``: whether the backward has halves; the first call knows, since the backward is compiled with the forward.
    """

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
        if self._halves is not None:
            tensors = stand_ins(self, [args[k] for k in self._weights])
            own = {} if tensors is None else dict(zip(self._weights, tensors))
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
                self._first = compile(found.first, values(found.first))
        self._second = compile(found.second, values(found.second, (strides or [])[len(found.inputs):]))
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
        if not leave_for_weights(_current_autograd_node(), self, partial(Leftover, rest)):
            for number, gradient in self._weight_gradients(rest):
                gradients[number] = gradient
        return gradients

    def accumulate(self, totals: Sequence[Total | None], parts: Sequence[tuple[Leftover, Any]]) -> None:
        """Adds the weight gradients of several calls."""
        total_of = dict(zip(self._weights, totals))
        for leftover, _ in parts:
            for number, gradient in self._weight_gradients(leftover.arguments()):
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
