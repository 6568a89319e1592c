"""Going backward without touching a leaf: the gradients are captured, and summed by hand.

Autograd would accumulate into ``.grad``, which is the user's, and fire hooks once a microbatch.

    output ──> layers ──> parameter         captured, and added to the stage's sums; .grad stays, hooks are parked
                  └─────> stage's input     captured, for the stage that it came from

The graph is freed during backward. It is kept if another microbatch may go through a part of it: a node that this
forward has not made, or a leaf that is no parameter of the stage (held by a closure, say). Nodes of this forward are
known by their sequence numbers, which count by thread. A node that was made elsewhere may have the same number by
chance; going through it twice is then an error, in torch's words.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core.graph import Edge, reached
from splitpipe.core.note import add_note
from splitpipe.core.torch_private import _engine_run_backward
from splitpipe.core.worker import ProcessLock
from splitpipe.deferral.accumulator import Sums
from splitpipe.stage.layers import StageLayers

#: The gradients of tensors that require grad; None where there is none.
Grads = list[Tensor | None]


class Graph(NamedTuple):
    """The graph of one (stage, microbatch)."""

    #: The edges by which the stage's inputs came in.
    entered: Sequence[GradientEdge]
    #: The phony of calls that leave something for W, which autograd is to go through.
    phony: Sequence[GradientEdge]
    #: Parameters and other leaves that it leads to, and parameters that are computed (``functional_call``).
    leaves: Sequence[Tensor]
    #: True if another backward may go through a part of it.
    keep_graph: bool


class Capture:
    """Goes backward in one stage, up to parameters, even if they are no leaves (``torch.func.functional_call``)."""

    def __init__(self, own: StageLayers, sums: Sums, hooks: ParkedHooks) -> None:
        self._stage = own.name
        self._sums = sums
        self._hooks = hooks
        self._own = own.identities
        self._computed: dict[Edge, Tensor] = {_edge(x): x for x in own.computed}

    def graph(
        self,
        roots: Iterable[GradientEdge],
        entered: Sequence[GradientEdge],
        numbers: range,
        phony: GradientEdge | None = None,
    ) -> Graph:
        """The graph that a forward has made, whose nodes have these sequence numbers, back from its outputs' edges."""
        phonies = [] if phony is None else [phony]
        ends = {*self._computed, *((edge.node, edge.output_nr) for edge in (*entered, *phonies))}
        found = reached(((edge.node, edge.output_nr) for edge in roots), ends, numbers)
        keep_graph = found.others or any(id(leaf) not in self._own for leaf in found.leaves)
        computed = [self._computed[end] for end in found.ends if end in self._computed]
        # Each once, however many ways lead to it: the engine gives its whole gradient for each time it is listed.
        leaves = {id(leaf): leaf for leaf in (*found.leaves, *computed)}
        return Graph(entered, phonies, list(leaves.values()), keep_graph)

    def backward(self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph) -> Grads:
        """Adds to the sums of what the graph leads to; gives the gradients of the stage's inputs."""
        count, leaves = len(graph.entered), graph.leaves
        inputs = (*graph.entered, *leaves, *graph.phony)
        if not roots or not inputs:
            return [None] * count
        for leaf in leaves:
            if leaf._backward_hooks:
                self._hooks.park(leaf)
        found = self._grad(roots, grads, inputs, graph.keep_graph)
        with torch.no_grad():  # The worker's own grad mode is the forward's: each sum would be a new tensor.
            self._sums.add(leaves, found[count : count + len(leaves)])
        return list(found[:count])

    def backward_views(self, roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        """Computes the gradients of parameters from the gradients of their views."""
        self.backward(roots, grads, self.graph(roots, (), range(0)))

    def _grad(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: tuple[Any, ...], keep: bool
    ) -> Sequence[Tensor | None]:
        # As torch.autograd.grad, without the checks of its arguments.
        try:
            found: Sequence[Tensor | None] = _engine_run_backward(
                tuple(roots), tuple(grads), keep, False, inputs, allow_unreachable=True, accumulate_grad=False
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                add_note(
                    error,
                    f"{self._stage} has a reentrant torch.utils.checkpoint in it, which accumulates gradients itself, "
                    "during a schedule: pass use_reentrant=False to it, or give SplitPipe "
                    "checkpoint='always' instead.",
                )
            raise
        return found


def _edge(x: Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


_lock = ProcessLock()


class _Parked:
    """Replaces a parked hook, and does nothing."""

    __slots__ = ("holders", "hook")

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.holders: set[ParkedHooks] = set()

    def __call__(self, *_: object) -> None:
        return None


class ParkedHooks:
    """The hooks that one call has parked."""

    def __init__(self) -> None:
        self._parked: list[tuple[dict[int, Any], int, _Parked]] = []

    def park(self, x: Tensor) -> None:
        """Parks the hooks that a tensor has now."""
        hooks: dict[int, Any] | None = x._backward_hooks
        if not hooks:
            return
        with _lock.lock:
            for key, hook in list(hooks.items()):
                if not isinstance(hook, _Parked):
                    hook = hooks[key] = _Parked(hook)
                if self not in hook.holders:
                    hook.holders.add(self)
                    self._parked.append((hooks, key, hook))

    def put_back(self) -> None:
        """Puts back each hook that no other call still parks."""
        with _lock.lock:
            for hooks, key, parked in self._parked:
                parked.holders.discard(self)
                if not parked.holders and hooks.get(key) is parked:  # Else its handle has removed it.
                    hooks[key] = parked.hook
            self._parked = []
