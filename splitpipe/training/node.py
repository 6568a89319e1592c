"""A checkpointed block as one node of the graph around it: its own graph is made in backward, where B goes through it.

    graph around   ... <── BlockNode <── ...       one node a call: its edges are inputs, and a phony
                               ¦
    block's own     input <── layers <── output    made again in backward, and gone when that is over

So autograd calls nothing of ours for what the block's nodes save. What B finds goes to a ``Sink``: weight gradients
into the sums and the ledger of a scheduled step, or (drop-in) to a Flush, which gives them to the parameters in one
sum. In a drop-in nn.Sequential the block is a microbatch on a stage.
Gradients that are to be differentiated don't get here: ``backward="autograd"`` has one graph.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core.graph import Edge, kind_of, reached
from splitpipe.core.thread_state import without_autocast
from splitpipe.core.torch_private import (
    AccumulateGrad,
    _current_graph_task_id,
    _get_current_graph_task_keep_graph,
    _will_engine_execute_node,
)
from splitpipe.deferral.owners import Note, about
from splitpipe.deferral.pending import Node, PendingGrad, WeightGroup
from splitpipe.deferral.stash import Stashes
from splitpipe.stage.again import Made
from splitpipe.stage.saved import Record, load, made_other, recomputation_error
from splitpipe.training.capture import Capture, Grads, Graph, ParkedHooks
from splitpipe.training.flush import Flush

#: Runs a block or a stage once more.
Rerun = Callable[[], Made]
#: The parameters that a phony leads to, by their identity: those of each Flush, in the order of its edges.
Ids = Sequence[Sequence[int]]
#: Of a block: a key, and its parameters.
Keyed = tuple[object, Sequence[Tensor]]


class Sink(Protocol):
    """Where the gradients go that the blocks of one stage find."""

    def phony(self, key: object, parameters: Sequence[Tensor]) -> tuple[Tensor, Ids]:
        """A tensor whose node autograd goes through if it wants the gradients of a block's parameters."""

    def graph(
        self, i: int, roots: Sequence[GradientEdge], entered: Sequence[GradientEdge], numbers: range
    ) -> Graph:
        """The graph of a microbatch on a block."""

    def backward_block(
        self, i: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, wanted: set[int] | None,
        now: bool = False,
    ) -> Grads:
        """The gradients of what entered; those of parameters, as far as they are ``wanted`` (None: all), are taken.

        ``now``: nothing that takes memory should wait for W.
        """


def used_by(graph: Graph) -> dict[int, Tensor]:
    """The leaves that a graph leads to, by their identity."""
    used = {id(x): x for x in graph.leaves}
    used.update({id(x): x for owner in graph.owners for x in owner.group.parameters})
    return used


class Flushes(Node):
    """A phony that leads to several others."""

    @staticmethod
    def forward(ctx: Any, *phonies: Tensor) -> Tensor:
        """The phony."""
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=phonies[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.next_functions)


class DropinSink:
    """Gradients for the parameters of one stage's blocks, by way of Flush."""

    def __init__(self, own: Any, stashes: Stashes) -> None:
        self._own = own
        #: Told how gradients of parameters are computed; None if that is known.
        self.note: Note | None = None
        self.stashes = stashes
        #: Of the stage.
        self.device = stashes.streams.device
        self._capture = Capture(own, ParkedHooks())
        self._phonies: dict[object, tuple[Tensor, Ids]] = {}
        self._of_graphs: dict[object, tuple[Tensor, Ids]] = {}
        self._lock = threading.Lock()

    def phony(self, key: object, parameters: Sequence[Tensor]) -> tuple[Tensor, Ids]:
        """The phony of a block, whose Flush is made once a call."""
        found = self._phonies.get(key)
        if found is None:
            with self._lock:
                found = self._phonies.get(key)
                if found is None:
                    leaves = [x for x in parameters if x.requires_grad]
                    if not leaves:
                        return torch.empty(0, device=self.stashes.streams.device), ()
                    make = partial(Flush.apply, self.stashes, leaves)
                    made = self.stashes.flushing(leaves, make)
                    found = self._phonies[key] = made, [[*map(id, leaves)]]
        return found

    def phony_of(self, graph: Graph, blocks: Sequence[Keyed] = ()) -> tuple[Tensor, Ids]:
        """A phony for a graph, by way of those of the blocks in it: it leads to the parameters that the graph does.

        Autograd would come to other parameters, too, and call what is registered for their gradients.
        """
        own = *map(id, graph.leaves), *[id(owner.group) for owner in graph.owners]
        found = self._of_graphs.get(own)
        if found is None:
            used, made = used_by(graph), list[tuple[Tensor, Ids]]()
            for key, parameters in blocks:
                every = [x for x in parameters if x.requires_grad]
                leaves = [x for x in every if used.pop(id(x), None) is not None]
                if leaves:
                    whole = len(leaves) == len(every)
                    made.append(self.phony(key if whole else (key, *map(id, leaves)), leaves))
            if used or not made:
                made.append(self.phony((*used,), [*used.values()]))
            phonies, ids = zip(*made)
            found = phonies[0] if len(made) == 1 else Flushes.apply(*phonies), [each for few in ids for each in few]
            self._of_graphs[own] = found
        return found

    def graph(
        self, i: int, roots: Sequence[GradientEdge], entered: Sequence[GradientEdge], numbers: range,
        seen: list[tuple[Tensor, bool, str]] | None = None, ends: Container[Edge] | None = None,
    ) -> Graph:
        """The graph, with the weights whose gradients wait; what there is to note goes to ``seen`` if that is given."""
        stashes = self.stashes
        note = self.note if seen is None or self.note is None else lambda *each: seen.append(each)
        return self._capture.graph(
            roots, entered, numbers, groups=stashes, gains=stashes.gains(i), note=note, ends=ends
        )

    def backward_block(
        self, i: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, wanted: set[int] | None,
        now: bool = False,
    ) -> Grads:
        """B, with hooks of parameters parked in this thread: Flush has their gradients."""
        stash = self.stashes.open() if graph.leaves or graph.owners else None
        hooks = ParkedHooks(threading.get_ident())
        left: list[tuple[WeightGroup, PendingGrad]] = []

        def leave(group: WeightGroup, new: PendingGrad) -> None:
            if wanted is None or not wanted.isdisjoint(map(id, group.parameters)):
                left.append((group, new))

        try:
            found, own = Capture(self._own, hooks).backward(
                roots, grads, graph, leave,
                early=None if stash is None or wanted is not None else partial(stash.early, now),
            )
        finally:
            hooks.put_back()
        if stash is not None:
            with torch.no_grad():
                stash.leave(left, now)
                stash.sums.add(graph.leaves, own)
        return found


class Flight:
    """What a microbatch on a block keeps from F to B."""

    __slots__ = ("_i", "_ids", "_sink", "_where")

    def __init__(self, sink: Sink, i: int, ids: Ids, where: str) -> None:
        self._sink = sink
        self._i = i
        self._ids = ids
        self._where = where

    def recompute(self) -> None:
        """Makes the graph of the running graph task, before its gradient is there."""

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        """The gradients of the inputs, as far as they are ``needed``; ``phony``: the node that leads to parameters."""
        raise NotImplementedError

    def _through(
        self, graph: Graph, roots: Sequence[GradientEdge], grads: Sequence[Tensor], needed: Sequence[bool],
        wanted: set[int] | None, now: bool = False, keep: bool = False,
    ) -> list[Tensor | None]:
        """B through a graph, to inputs that are ``needed`` and to parameters that are ``wanted`` (None: all).

        ``now``: nothing that takes memory should wait for W; ``keep``: the graph is not freed.
        """
        entered = [edge for edge, need in zip(graph.entered, needed) if need]
        leaves, edges = graph.leaves, graph.edges
        if wanted is not None:
            places = [k for k, leaf in enumerate(leaves) if id(leaf) in wanted]
            leaves, edges = [leaves[k] for k in places], [edges[k] for k in places]
        keep = keep or graph.keep_graph
        graph = Graph(entered, graph.phonies, graph.owners, graph.custom, leaves, edges, keep)
        with without_autocast():  # The user's backward may be called under it.
            found = iter(self._sink.backward_block(self._i, roots, grads, graph, wanted, now))
        return [next(found) if need else None for need in needed]

    def _wanted(self, phony: Any) -> set[int] | None:
        """The parameters that autograd will come to; None: all."""
        if not _needs(phony):
            return set()
        several = len(self._ids) > 1
        wanted, every = set[int](), True
        for node, ids in zip([node for node, _ in phony.next_functions] if several else [phony], self._ids):
            after = node.next_functions
            if len(after) != len(ids):  # No Flush.
                return None
            found = [leaf for leaf, (node, _) in zip(ids, after) if _needs(node)]
            wanted.update(found)
            every = every and len(found) == len(ids)
        return None if every else wanted


class Dropped(Flight):
    """Of a checkpointed one, whose graph is made in backward."""

    __slots__ = ("_again", "_kinds", "_lock", "_others", "_places", "_ready")

    def __init__(
        self, again: Rerun, sink: Sink, i: int, ids: Ids, places: list[tuple[int, Any]], kinds: Any, where: str,
        others: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(sink, i, ids, where)
        self._again = again
        self._places = places  # Of outputs that require grad, with the kinds of their nodes.
        self._kinds = kinds
        self._others: list[Record] = [(x, x._version) for x in others]  # Leaves, used again as they were.
        self._ready: dict[int, Made] = {}  # By graph task.
        self._lock = threading.Lock()

    def recompute(self) -> None:
        """Makes the graph of the running graph task, before its gradient is there."""
        with self._lock:
            task = _current_graph_task_id()
            if task not in self._ready:
                self._ready[task] = self._made()

    def _made(self) -> Made:
        for record in self._others:
            load(record)
        return self._again()

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        made = self._ready.pop(_current_graph_task_id(), None) or self._made()
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
        graph = self._sink.graph(self._i, roots, entered, numbers)
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
            f"({self._where}) made {found} nodes of autograd's, where the forward made {expected}, and "
            f"{type(getattr(x, 'grad_fn', None)).__name__} for its output {place}, where the forward made "
            f"{kind.__name__}"
        )

    def _unknown(self, graph: Graph) -> bool:
        """True for leaves that the run has made itself, as the forward has; others would lose their gradients."""
        leaves = {id(x): x for x in graph.leaves}
        leaves.update({id(x): x for owner in graph.owners for x in owner.group.parameters})
        known = {leaf for ids in self._ids for leaf in ids}
        new = [x for key, x in leaves.items() if key not in known and x.requires_grad]
        gone = [x for x, _ in self._others if id(x) not in leaves]
        if new and sorted([tuple(x.shape) for x in new]) != sorted([tuple(x.shape) for x in gone]):
            raise RuntimeError(
                f"{self._where}: used a {list(new[0].shape)} tensor that requires grad and is none of its parameters, "
                "which its forward had not done: its gradient would be lost. Hand it over as an argument, or use "
                "checkpoint='never' or backward='autograd'."
            )
        return bool(new)


class BlockNode(Node):
    """The outputs of a block or stage that require grad; backward is B in the graph that ``flight`` has or makes."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, outputs: list[Tensor], *_: Tensor) -> Any:
        """The outputs, outside of their graph; given a phony and the inputs."""
        ctx.set_materialize_grads(False)
        ctx.flight = flight
        return tuple([x.detach() for x in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flight, edges = ctx.flight, ctx.next_functions
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was passed to a backward through a pipeline whose stages have graphs of their own: "
                "expected SplitPipe(..., backward='autograd') for second derivatives, and checkpoint='never'."
            )
        if flight is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what its stages keep was freed by the first "
                "backward. Pass retain_graph=True to it."
            )
        if not _get_current_graph_task_keep_graph():
            ctx.flight = None
        if all([grad is None for grad in grads]):
            return (None,) * (2 + len(edges))
        needed = [_needs(node) for node, _ in edges[1:]]
        return None, None, None, *flight.backward(grads, needed, edges[0][0])


def _needs(node: Any) -> bool:
    # Of a leaf the engine does not say.
    return node is not None and (type(node) is AccumulateGrad or _will_engine_execute_node(node))


#: Whose tensors, if there are any, are seen.
OPEN = (Tensor, torch.Size, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def may_be_made_again(
    made: Sequence[Any], given: Sequence[Any], device: torch.device, ends: Container[Edge] | None = None
) -> bool:
    """True if a first run hands on tensors in the open, and its graph has nothing that needs another graph around it.

    That is a leaf on another device, whose streams are others', or a node that refuses a B to some leaves only.
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
    made: list[Any], own: dict[int, Tensor], flight: Callable[[list[tuple[int, Any]]], Dropped], phony: Tensor,
    inputs: Sequence[Tensor],
) -> list[Any]:
    """The leaves of a block's output, with a BlockNode for those that require grad; what it hands on is as it was.

    Args:
        made: these leaves.
        own: the caller's tensors, by the identity of what the block was given for them.
        flight: made for the places of outputs.
        phony: of the block.
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
