"""A microbatch that is not checkpointed as one node of the graph around it: B goes through the graph of its own run.

    graph around   ... <── BlockNode <── ...
                               ¦
    block's own     input <── layers <── output     made in forward

By layers, a stage's first run shows what it does. What needs the graph around (it is given an object that may carry
tensors, say) stays a part of that, as ``StageFacts.apart`` remembers. By cuts, ``segments.parts`` has its part cut out.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core.graph import enter, pairs_of, reached, unleaf
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import (
    _get_current_graph_task_keep_graph,
    _get_sequence_nr,
    _will_engine_execute_node,
)
from splitpipe.stage.layers import StageFacts
from splitpipe.training.capture import Graph
from splitpipe.training.node import OPEN, BlockNode, DropinSink, Flight, Ids, used_by


class Held(Flight):
    """Of a microbatch that is not checkpointed: the graph that its run has made."""

    __slots__ = ("_graph", "_roots")

    def __init__(
        self, graph: Graph, roots: Sequence[GradientEdge], sink: DropinSink, i: int, ids: Ids, where: str
    ) -> None:
        super().__init__(sink, i, ids, where)
        self._graph, self._roots = graph, roots

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        graph, keep = self._graph, _get_current_graph_task_keep_graph()
        # Autograd comes to nodes of this graph by another way, and may have been there.
        if not keep and any([_will_engine_execute_node(owner.node) for owner in graph.owners]):
            raise self._shared()
        roots, used = [*self._roots], [grad for grad in grads if grad is not None]
        if len(used) != len(roots):
            roots = [edge for edge, grad in zip(roots, grads) if grad is not None]
        try:
            return self._through(graph, roots, used, needed, self._wanted(phony), keep=keep)
        except RuntimeError as error:
            if not keep and str(error).startswith("Trying to backward through the graph a second time"):
                raise self._shared() from error
            raise

    def _shared(self) -> RuntimeError:
        return RuntimeError(
            f"{self._where}: a backward comes to its graph by its output and by a tensor from inside that a layer (or "
            "a hook) has kept, such as a loss of its own. With backward='split' that graph is gone through in one go: "
            "expected SplitPipe(..., backward='autograd'), retain_graph=True, or the tensor returned by the layer."
        )


_STAYS = "its layer needs the graph around it"


def _comes_back(entered: Sequence[GradientEdge], graph: Graph) -> bool:
    """True if the graph around a stage leads to where its B ends by another way, which that B would go, too."""
    ends = {*pairs_of(entered), *pairs_of(graph.edges)}
    before = [edge for node in {edge.node for edge in entered} for edge in node.next_functions]
    return bool(reached(before, ends).ends)


class StageInputs:
    """The inputs of a microbatch on a stage that is not checkpointed, and what has become of them in its run."""

    def __init__(self, facts: StageFacts, sink: DropinSink, given: Sequence[Any]) -> None:
        """Takes what the stage is given, on its stream; it may write to that.

        Args:
            facts: of the stage.
            sink: of the stage.
            given: the leaves of its inputs; ``leaves`` are what it is to be given in their place.
        """
        self._facts, self._sink, self._given = facts, sink, given
        self.inputs: list[Tensor] = []
        known: dict[int, Any] = {}
        #: The caller's tensors, by the identity of what the stage is given for them.
        self._own: dict[int, Tensor] = {}
        for x in given:
            if isinstance(x, Tensor) and id(x) not in known:
                y = x
                if x.requires_grad:  # Hooks of the caller's tensor are the graph's around.
                    self.inputs.append(x)
                    y = enter(x.detach().requires_grad_()) if facts.apart else unleaf(x)
                known[id(x)] = y
                self._own[id(y)] = x
        self.leaves = [known.get(id(x), x) if isinstance(x, Tensor) else x for x in given]
        self._tensors = [*known.values()]
        self._versions = [*map(version_of, self._tensors)]
        self._entered = [get_gradient_edge(known[id(x)]) for x in self.inputs]
        self._first = _get_sequence_nr()

    def outputs(
        self, i: int, key: object, parameters: Sequence[Tensor], made: list[Any], where: str, device: torch.device
    ) -> list[Any]:
        """The leaves of the output, with a node for those that require grad if the stage has a graph of its own.

        Args:
            i: the number of the microbatch.
            key: of the stage.
            parameters: of the stage.
            made: the leaves.
            where: that is, for messages.
            device: of the stage.

        Raises:
            RuntimeError: the stage does what a graph of its own does not allow, which it had not done before.
        """
        facts, sink, own = self._facts, self._sink, self._own
        for y, version in zip(self._tensors, self._versions):
            if version_of(y) != version:  # It is another value now.
                own.pop(id(y))
        found = {id(x): x for x in made if isinstance(x, Tensor) and id(x) not in own and x.requires_grad}
        open = all([isinstance(x, OPEN) for x in (*made, *self._given)])
        if facts.apart and not open:
            facts.apart = False
            raise RuntimeError(
                f"{where} was given, or gave, an object that may carry tensors, which it had not done before: its "
                "gradient would be lost. It now stays in the graph around it; repeat the step."
            )
        if not found:
            return [own.get(id(x), x) if isinstance(x, Tensor) else x for x in made]
        roots = [*map(get_gradient_edge, found.values())]
        seen: list[tuple[Tensor, bool, str]] | None = None if facts.apart or sink.note is None else []
        graph = sink.graph(i, roots, self._entered, range(self._first, _get_sequence_nr()), seen)
        if not facts.apart:
            here = all([x.device == device for x in used_by(graph).values()])
            facts.apart = open and here and not (graph.keep_graph or graph.bound)
            for x, deferred, why in seen or ():
                sink.note(x, deferred and facts.apart, why if facts.apart else _STAYS)  # type: ignore[misc]
            if not facts.apart or _comes_back(self._entered, graph):
                return made
        phony, ids = sink.phony_of(graph, [(key, parameters)])
        nodes = BlockNode.apply(Held(graph, roots, sink, i, ids, where), [*found.values()], phony, *self.inputs)
        given = {**own, **dict(zip(found, nodes))}
        return [given.get(id(x), x) if isinstance(x, Tensor) else x for x in made]
