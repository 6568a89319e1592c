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
from splitpipe.backward.rules import WeightNode, total_version
from splitpipe.core.torch_private import run_backward

_SHARED = (
    "microbatches share a part of a graph, and the backward of one has freed it for the others: weights that the "
    "caller computed, or a tensor that a layer keeps from one call to the next. Expected layers that compute "
    "everything from their inputs and parameters in each call, detached tensors, or SplitPipe(..., "
    "backward='autograd', checkpoint='never')."
)


class Part(NamedTuple):
    """What B has left for W of a node: what its ``accumulate`` gets, and the version of all of that."""

    node: WeightNode
    ctx: Any  #: The weight node itself, or what was left at stand-ins. Has ``saved_for_weight``.
    grad: Any  #: That of the output; None for compiled code.
    version: int


class InputGradients(NamedTuple):
    """What B has computed, and left for W."""

    entries: Sequence[Tensor | None]  #: None: no gradient arrived.
    leaves: Sequence[tuple[Tensor, Tensor]]  #: Each with its gradient.
    parts: Sequence[Part]


def backward_input(
    roots: Sequence[GradientEdge], grads: Sequence[Tensor], entries: Sequence[GradientEdge], graph: Walk, keep: bool
) -> InputGradients:
    """Runs backward from the roots, given their gradients, to ``entries``; ``keep``: the graph is needed again."""
    nodes, stand_ins, leaves = graph
    ends = (*entries, *[GradientEdge(node, 0) for node in nodes], *leaves)
    if not roots or not ends:
        return InputGradients([None] * len(entries), [], [])
    for node in stand_ins:
        node.leftovers = []
    try:
        captured = run_backward(tuple(roots), tuple(grads), keep, False, ends, True, False)
        left = [Part(own, *each) for node, own in stand_ins.items() for each in node.leftovers]
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise RuntimeError(_SHARED) from error
        raise
    finally:
        for node in stand_ins:
            node.leftovers = None
    first, last = len(entries), len(entries) + len(nodes)
    # Versions of what nodes have saved are those at the end of F: B doesn't read it, as autograd would.
    parts = [
        Part(own, own, grad, own.version + total_version([grad]))
        for own, grad in zip(nodes.values(), captured[first:last]) if grad is not None
    ]
    pairs = [(x, grad) for x, grad in zip(leaves, captured[last:]) if grad is not None]
    return InputGradients(captured[:first], pairs, parts + left)


def _silent(*_: Any) -> None:
    """Takes the place of a parked hook, which can then be removed meanwhile."""


class LeafHooks:
    """Parked hooks of leaves."""

    def __init__(self) -> None:
        self._parked: list[tuple[dict[int, Any], int, Any]] = []  # A tensor's table of hooks, key, hook.

    def park(self, leaves: Iterable[Tensor]) -> None:
        """Parks the hooks that leaves have now."""
        tables: list[Any] = [table for x in leaves for table in (x._backward_hooks, x._post_accumulate_grad_hooks)]
        for table in filter(None, tables):
            self._parked += [(table, key, hook) for key, hook in table.items() if hook is not _silent]
            table.update(dict.fromkeys(table, _silent))

    def restore(self) -> None:
        """Puts the hooks back that haven't been removed."""
        parked, self._parked = self._parked, []
        for table, key, hook in parked:
            if table.get(key) is _silent:
                table[key] = hook
