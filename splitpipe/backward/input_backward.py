"""B: the gradients of a stage's inputs, by one call of autograd's engine; what W needs is captured on the way.

    given gradients ──> roots ──> ... ──┬──> entries       sent to the stages before
                                        ├──> weight nodes  the gradients of their outputs, for W
                                        └──> other leaves  summed at once

Hooks of parameters are silent meanwhile: they see the gradients of the batch, once.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.backward.graph_walk import Walk
from splitpipe.core.torch_private import run_backward

_SHARED = (
    "microbatches share a part of a graph, and the backward of one has freed it for the others: weights that the "
    "caller computed, or a tensor that a layer keeps from one call to the next. Expected layers that compute "
    "everything from their inputs and parameters in each call, detached tensors, or SplitPipe(..., "
    "backward='autograd', checkpoint='never')."
)


class InputGradients(NamedTuple):
    """What B has computed; None where no gradient arrived."""

    entries: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]  #: Of the weight nodes.
    leaves: Sequence[Tensor | None]


def backward_input(
    roots: Sequence[GradientEdge], grads: Sequence[Tensor], entries: Sequence[GradientEdge], graph: Walk, keep: bool
) -> InputGradients:
    """Runs backward from the roots, given their gradients, to ``entries``; ``keep``: the graph is needed again."""
    nodes, leaves = graph.weight_nodes, graph.leaves
    ends = (*entries, *[GradientEdge(node.node, 0) for node in nodes], *leaves)
    if not roots or not ends:
        return InputGradients([None] * len(entries), [None] * len(nodes), [None] * len(leaves))
    try:
        captured = run_backward(tuple(roots), tuple(grads), keep, False, ends, True, False)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise RuntimeError(_SHARED) from error
        raise
    first, last = len(entries), len(entries) + len(nodes)
    return InputGradients(captured[:first], captured[first:last], captured[last:])


def _silent(*_: Any) -> None:
    """Takes the place of a parked hook, which can then be removed meanwhile."""


class LeafHooks:
    """Parked hooks of leaves."""

    def __init__(self) -> None:
        self._parked: list[tuple[dict[int, Any], int, Any]] = []  # The tensor's table of hooks, key, hook.

    def park(self, leaves: Iterable[Tensor]) -> None:
        """Parks the hooks that leaves have now."""
        for x in leaves:
            tables: list[Any] = [x._backward_hooks, x._post_accumulate_grad_hooks]
            for table in filter(None, tables):
                for key, hook in list(table.items()):
                    if hook is not _silent:
                        self._parked.append((table, key, hook))
                        table[key] = _silent

    def restore(self) -> None:
        """Puts the hooks back that haven't been removed."""
        parked, self._parked = self._parked, []
        for table, key, hook in parked:
            if table.get(key) is _silent:
                table[key] = hook
