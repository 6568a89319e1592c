"""A checkpointed block as a node: its graph is recomputed in backward, and freed afterwards.

So autograd doesn't call saved-tensor hooks for what the block's nodes save.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core.graph import Edge, kind_of, reached
from splitpipe.core.torch_private import _current_graph_task_id
from splitpipe.deferral.owners import about
from splitpipe.stage.run import Made, SeparateRun
from splitpipe.stage.saved import Record, load, made_other, recomputation_error
from splitpipe.training.capture import Graph
from splitpipe.training.node import BlockNode, Flight
from splitpipe.training.sink import Ids, Sink, used_by

#: Used instead of a graph task's number.
_BEFORE = -1


class Recomputed(Flight):
    """What a checkpointed microbatch keeps; its graph is made in backward."""

    __slots__ = ("_again", "_kinds", "_lock", "_others", "_places", "_ready")

    def __init__(
        self, again: SeparateRun, sink: Sink, i: int, ids: Ids, places: list[tuple[int, Any]], kinds: Any, where: str,
        others: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(sink, i, ids, where)
        self._again = again
        self._places = places  # Places of outputs that require grad, with the kinds of their nodes.
        self._kinds = kinds
        self._others: Sequence[Record] = [(x, x._version) for x in others] if others else ()  # They mustn't change.
        self._ready: dict[int, Made] = {}  # By graph task.
        self._lock = threading.Lock()

    def recompute(self) -> None:
        """Makes the graph for the running graph task, before its gradient is there."""
        with self._lock:
            task = _current_graph_task_id()
            if task not in self._ready:
                self._ready[task] = self._made()

    def prepare(self) -> None:
        """Makes the graph for the next backward, before it begins."""
        self._ready[_BEFORE] = self._made()

    def _made(self) -> Made:
        for record in self._others:
            load(record)
        return self._again()

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        made = self._ready.pop(_BEFORE, None) or self._ready.pop(_current_graph_task_id(), None) or self._made()
        roots: list[GradientEdge] = []
        used: list[Tensor] = []
        for (place, kind), grad in zip(self._places, grads):
            x = made.leaves[place] if place < len(made.leaves) else None
            if made.kinds != self._kinds or not isinstance(x, Tensor) or kind_of(x.grad_fn) is not kind:
                raise self._differs(made, place, kind, x)
            if grad is not None:
                roots.append(get_gradient_edge(x))
                used.append(grad)
        entered, numbers, x = made.entered, made.numbers, None
        del made
        graph = self._sink.graph(self._i, roots, entered, numbers, block=self._again.stage.facts)
        wanted = self._wanted(phony)
        if self._unknown(graph) and wanted is None:
            wanted = {leaf for ids in self._ids for leaf in ids}
        del entered
        return self._through(graph, roots, used, needed, wanted, now=True)

    def _differs(self, made: Made, place: int, kind: Any, x: Any) -> RuntimeError:
        found, expected = made.kinds, self._kinds
        if isinstance(found, list):
            return made_other(found, expected)
        return recomputation_error(
            f"({self._where}) made {found} autograd nodes, but the forward made {expected}; and it made "
            f"{type(getattr(x, 'grad_fn', None)).__name__} for its output {place}, but the forward made "
            f"{kind.__name__}"
        )

    def _unknown(self, graph: Graph) -> bool:
        """True for leaves that the run itself has made, like the forward; others would lose their gradients."""
        known = {leaf for ids in self._ids for leaf in ids}
        leaves = used_by(graph)
        if not self._others and known.issuperset(leaves):
            return False
        new = [x for key, x in leaves.items() if key not in known and x.requires_grad]
        gone = [x for x, _ in self._others if id(x) not in leaves]
        if new and sorted([tuple(x.shape) for x in new]) != sorted([tuple(x.shape) for x in gone]):
            self._again.stage.facts.plain = False
            raise RuntimeError(
                f"{self._where}: used a {list(new[0].shape)} tensor that requires grad and isn't one of its "
                "parameters, which earlier runs hadn't used: its gradient would be lost. Repeat the step, which will "
                "take this into account."
            )
        return bool(new)


#: The owner of the tensors, if there are any, that are visible.
OPEN = (Tensor, torch.Size, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def may_be_made_again(
    made: Sequence[Any], given: Sequence[Any], device: torch.device, ends: Container[Edge] | None = None
) -> bool:
    """True if a first run passes its tensors on visibly, and its graph has nothing that needs another graph around it.

    Such things are a leaf on another device, whose streams are different, and a node that doesn't allow B for some
    leaves only.
    """
    if not all([isinstance(x, OPEN) for x in (*made, *given)]):
        return False
    roots = [(x.grad_fn, x.output_nr) for x in made if isinstance(x, Tensor) and x.grad_fn is not None]
    if ends is None:
        ends = {(x.grad_fn, x.output_nr) for x in given if isinstance(x, Tensor) and x.grad_fn is not None}
    found = reached(roots, ends)
    kinds: set[Any] = {type(node) for node in found.nodes}
    bound = any([about(kind)[2] for kind in kinds])
    return not bound and all([leaf.device == device for leaf in found.leaves])


def outputs_of(
    made: list[Any], own: dict[int, Tensor], flight: Callable[[list[tuple[int, Any]]], Recomputed], phony: Tensor,
    inputs: Sequence[Tensor],
) -> list[Any]:
    """The leaves of a block's output, with a BlockNode for those that require grad; passed-through values stay as is.

    Args:
        made: these leaves.
        own: the caller's tensors, by the identity of the tensors that the block got for them.
        flight: made from the places of outputs.
        phony: that of the block.
        inputs: those that require grad.
    """
    places: dict[int, int] = {}
    for k, x in enumerate(made):
        if isinstance(x, Tensor) and id(x) not in own and x.requires_grad:
            places.setdefault(id(x), k)
    if places:
        numbered = [(k, kind_of(made[k].grad_fn)) for k in places.values()]
        found = BlockNode.apply(flight(numbered), [made[k] for k in places.values()], phony, *inputs)
        own = {**own, **dict(zip(places, found))}
    return [own.get(id(x), x) if isinstance(x, Tensor) else x for x in made]
