"""A microbatch on a stage or block as one node of the surrounding graph. B runs through a separate graph.

    surrounding    ... <── BlockNode <── ...       one node per call: its edges are inputs, and a phony
                               ¦
    separate        input <── layers <── output    made in forward (Held), or again in backward (``recomputed``)

What B finds goes to a ``Sink``: weight gradients go into the sums and the ledger of a scheduled step, or, drop-in, to a
Flush, which gives them to the parameters as one sum. Gradients that are to be differentiated don't get here: with
``backward="autograd"``, there is one graph.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core.graph import pairs_of, reached
from splitpipe.core.thread_state import without_autocast
from splitpipe.core.torch_private import _get_current_graph_task_keep_graph, _will_engine_execute_node
from splitpipe.deferral.pending import Node
from splitpipe.training.capture import Graph
from splitpipe.training.sink import DropinSink, Ids, Sink, needs


class Flight:
    """What a microbatch on a block keeps from F to B."""

    __slots__ = ("_i", "_ids", "_sink", "_where")

    def __init__(self, sink: Sink, i: int, ids: Ids, where: str) -> None:
        self._sink = sink
        self._i = i
        self._ids = ids
        self._where = where

    def recompute(self) -> None:
        """Makes the graph for the running graph task, before its gradient is there."""

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        """The gradients of the inputs that are ``needed``; ``phony``: the node that leads to parameters."""
        raise NotImplementedError

    def _through(
        self, graph: Graph, roots: Sequence[GradientEdge], grads: Sequence[Tensor], needed: Sequence[bool],
        wanted: set[int] | None, now: bool = False, keep: bool = False,
    ) -> list[Tensor | None]:
        """B through a graph, to inputs that are ``needed`` and to parameters that are ``wanted`` (None: all).

        ``now``: nothing that takes memory should wait for W; ``keep``: the graph isn't freed.
        """
        if wanted is not None or keep or not all(needed):  # Usually, all of it is needed.
            leaves, edges = graph.leaves, graph.edges
            if wanted is not None:
                places = [k for k, leaf in enumerate(leaves) if id(leaf) in wanted]
                leaves, edges = [leaves[k] for k in places], [edges[k] for k in places]
            entered = [edge for edge, need in zip(graph.entered, needed) if need]
            keep = keep or graph.keep_graph
            graph = graph._replace(entered=entered, leaves=leaves, edges=edges, keep_graph=keep)
        with without_autocast():  # The user may call backward under autocast.
            found = iter(self._sink.backward_block(self._i, roots, grads, graph, wanted, now))
        return [next(found) if need else None for need in needed]

    def _wanted(self, phony: Any) -> set[int] | None:
        """The parameters that autograd will reach; None: all."""
        return self._sink.wanted(phony, self._ids) if needs(phony) else set()


class Held(Flight):
    """What a microbatch that isn't checkpointed keeps: the graph that its run has made."""

    __slots__ = ("_graph", "_roots")

    def __init__(
        self, graph: Graph, roots: Sequence[GradientEdge], sink: DropinSink, i: int, ids: Ids, where: str
    ) -> None:
        super().__init__(sink, i, ids, where)
        self._graph, self._roots = graph, roots

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        graph, keep = self._graph, _get_current_graph_task_keep_graph()
        # Autograd reaches nodes of this graph on another way, and may have been there.
        if not keep and any([_will_engine_execute_node(owner.node) for owner in graph.owners]):
            raise self._shared()
        roots, used = [*self._roots], [grad for grad in grads if grad is not None]
        if len(used) != len(roots):
            roots = [edge for edge, grad in zip(roots, grads) if grad is not None]
            # What an owner that B doesn't reach has saved may have been written to since.
            nodes = reached(pairs_of(roots), {*pairs_of(graph.entered)}).nodes
            graph = graph._replace(owners=[owner for owner in graph.owners if owner.node in nodes])
        try:
            return self._through(graph, roots, used, needed, self._wanted(phony), keep=keep)
        except RuntimeError as error:
            if not keep and str(error).startswith("Trying to backward through the graph a second time"):
                raise self._shared() from error
            raise

    def _shared(self) -> RuntimeError:
        return RuntimeError(
            f"{self._where}: a backward reaches its graph from its output and from a tensor inside it that a layer "
            "(or a hook) has kept, such as a separate loss. With backward='split', that graph is run through only "
            "once: expected SplitPipe(..., backward='autograd'), retain_graph=True, or the tensor to be returned by "
            "the layer."
        )


class BlockNode(Node):
    """The outputs of a block or stage that require grad; backward is B in the graph that ``flight`` has or makes."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, outputs: list[Tensor], *_: Tensor) -> Any:
        """The outputs, outside their graph, given a phony and the inputs."""
        ctx.set_materialize_grads(False)
        ctx.flight = flight
        return tuple([x.detach() for x in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flight, edges = ctx.flight, ctx.next_functions
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was passed to a backward through a pipeline whose stages have separate graphs: "
                "expected SplitPipe(..., backward='autograd') for second derivatives, and checkpoint='never'."
            )
        if flight is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the first backward freed what its stages keep. "
                "Pass retain_graph=True to it."
            )
        if not _get_current_graph_task_keep_graph():
            ctx.flight = None
        if all([grad is None for grad in grads]):
            return (None,) * (2 + len(edges))
        needed = [needs(node) for node, _ in edges[1:]]
        return None, None, None, *flight.backward(grads, needed, edges[0][0])

