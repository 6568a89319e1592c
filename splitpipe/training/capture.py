"""Runs backward without touching leaves: their gradients are captured, and summed explicitly.

Autograd would accumulate into ``.grad``, which belongs to the user, and fire hooks once per microbatch.

    output ──> layers ──> weight's owner    its output gradient is captured, and left for W with what the node has saved
                  ├─────> other parameter   captured, and added to the stage's sums; .grad stays, hooks are parked
                  └─────> stage's input     captured, for the stage that it came from

The graph is freed during backward. It is kept if another microbatch may run through a part of it: a node that this
forward hasn't made, or a leaf that isn't a parameter of the stage (for example, one in a closure). Nodes of this
forward are recognised by their sequence numbers, which count per thread. A node that was made elsewhere may have the
same number by chance; running through it twice is then an error of torch's.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import Edge, leading, pairs_of
from splitpipe.core.note import add_note
from splitpipe.core.stream import Stream
from splitpipe.core.tensors import is_plain, version_of
from splitpipe.core.torch_private import RemovableHandle, _engine_run_backward
from splitpipe.core.worker import ProcessLock
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.owners import Groups, Note, Owner, Survey, owners_like, survey
from splitpipe.deferral.pending import PendingGrad, WeightGroup
from splitpipe.deferral.rules import GainsOf
from splitpipe.deferral.shape import Ends, Entered, Shape
from splitpipe.stage.layers import StageFacts, StageLayers

#: Takes what an owner leaves for W.
Leave = Callable[[WeightGroup, PendingGrad], None]
#: The gradients of tensors that require grad; None where there is none.
Grads = list[Tensor | None]


class Graph(NamedTuple):
    """The graph of one (stage, microbatch)."""

    #: The edges through which the stage's inputs entered.
    entered: Sequence[GradientEdge]
    #: Edges through which autograd must run although nothing needs their gradients.
    phonies: Sequence[GradientEdge]
    #: The nodes that leave a pending gradient for W.
    owners: Sequence[Owner]
    #: True if a node may write to its gradient, which an owner may have received too.
    custom: bool
    #: The parameters and other leaves that it leads to, and parameters that are computed (``functional_call``).
    leaves: Sequence[Tensor]
    edges: Sequence[Any]
    #: True if another backward may run through a part of it.
    keep_graph: bool
    #: True if a node needs the surrounding graph.
    bound: bool = False
    #: The places of leaves whose gradients are large.
    large: Sequence[int] = ()
    #: The same object for graphs of one call that lead to the same leaves, through the same groups; None: not known.
    alike: Any = None


#: Size in bytes from which on a leaf's gradient is added to its sum before the others are computed. Small ones
#: take little memory, but each needs the interpreter's lock inside B: a tenth of the step of a narrow ResNet-101.
_LARGE = 2**20


def _is_large(leaf: Tensor) -> bool:
    return leaf.is_leaf and is_plain(leaf) and leaf.nbytes >= _LARGE


class Summed:
    """Adds gradients of leaves to their sums during one backward; otherwise, all would exist next to their sums."""

    def __init__(self, sums: Sums, compute: Stream) -> None:
        self._sums = sums
        self._compute = compute
        # On the CPU, autograd runs in the worker's own thread, and another stage with the leaf in another thread.
        self._thread = get_ident() if compute is None else None

    def hook(self, leaf: Tensor) -> Any:
        """Makes the leaf's gradient be added to its sum; returns a handle that ends this."""
        return leaf.register_hook(_Adding(self._sums.of(leaf), self._compute, self._thread))


class _Adding:
    """A hook that adds a gradient to a sum, and returns zeros that take no memory."""

    __slots__ = ("_compute", "_thread", "_total")

    def __init__(self, total: Total, compute: Stream, thread: int | None) -> None:
        self._total, self._compute, self._thread = total, compute, thread

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or grad.layout is not torch.strided or self._thread not in (None, get_ident()):
            return None
        compute = self._compute
        if compute is not None:  # A leaf's node belongs to the stream that first asked for it.
            stream.wait(compute, stream.current(compute.device))
            stream.hold(grad, compute)
        with stream.use(compute):
            self._total.add(grad)
        return grad.new_zeros(()).expand(grad.shape)


#: Takes what owners leave as it comes, given what they keep of their inputs; None if that may wait until B ends.
Early = Callable[[Sequence[Owner], Sequence[PendingGrad]], Leave | None]


def _leave(owner: Owner, new: PendingGrad, grad: Tensor | None, version: int | None, leave: Leave | None) -> None:
    """Makes an owner leave what it has, given the gradient that has arrived at it and its version at that time."""
    ctx = owner.rule.take(new.ctx)
    if leave is None or ctx is None:
        return
    if owner.rule.partial:
        leave(owner.group, PendingGrad(ctx))
    elif grad is not None:
        if ctx is not new.ctx:
            new.take_on(ctx)
        new.arrived(grad, version)
        leave(owner.group, new)


def _at_once(
    roots: Sequence[GradientEdge], graph: Graph, kept: Sequence[PendingGrad], leave: Leave
) -> tuple[list[Owner], list[PendingGrad], list[Any]]:
    """Makes owners leave what they have as soon as B has passed them; returns those that B doesn't reach."""
    waiting = dict(enumerate(kept))
    through = leading([(edge.node, edge.output_nr) for edge in roots],
                      {(edge.node, edge.output_nr) for edge in (*graph.entered, *graph.phonies)})
    handles = []
    for number, owner in enumerate(graph.owners):
        if owner.node in through and not owner.lone:

            def hook(_: Any, grads: tuple[Tensor | None, ...], number: int = number, owner: Owner = owner) -> None:
                _leave(owner, waiting.pop(number), grads[0], None, leave)

            handles.append(owner.node.register_hook(hook))
    left = [number for number, owner in enumerate(graph.owners) if owner.node not in through or owner.lone]
    return [graph.owners[number] for number in left], [waiting.pop(number) for number in left], handles


class Capture:
    """Runs backward in one stage, up to parameters, even if they aren't leaves (``torch.func.functional_call``)."""

    def __init__(self, own: StageLayers, hooks: ParkedHooks) -> None:
        self._stage = own.name
        self._hooks = hooks
        #: How many hooks this process had registered before the stage's graphs were made.
        self._registered = RemovableHandle.next_id
        self._own = own.identities
        self._computed: dict[Edge, Tensor] = {_edge(x): x for x in own.computed}
        #: By kind, the shape that graphs of this call have had, and its owners, without nodes; None: they differ.
        self._seen: dict[Any, tuple[Shape | None, list[Owner]] | None] = {}

    def graph(
        self,
        roots: Iterable[GradientEdge],
        entered: Sequence[GradientEdge],
        numbers: range,
        phonies: Sequence[GradientEdge] = (),
        groups: Groups | None = None,
        gains: GainsOf = (True, True),
        note: Note | None = None,
        ends: Ends | None = None,
        facts: StageFacts | None = None,
        block: bool = False,
    ) -> Graph:
        """The graph that a forward has made, searched from its outputs' edges.

        Args:
            roots: these edges.
            entered: the edges of its inputs.
            numbers: the sequence numbers of its nodes.
            phonies: edges through which autograd must run although nothing needs their gradients.
            groups: those of the weights whose owners leave something for W; None: B computes everything.
            gains: those of the microbatch.
            note: called with the ways to parameters.
            ends: where the search ends; None: at ``entered`` and ``phonies``.
            facts: those of the stage, or of the block, whose graphs usually have the same shape.
            block: whether it is that of a recomputed block or stage.
        """
        if ends is None:
            ends = Entered(pairs_of((*entered, *phonies)), numbers)
        starts = pairs_of(roots)
        alike = facts is not None and note is None and groups is not None and not self._computed and bool(numbers)
        if not alike:
            return self._surveyed(survey(starts, ends, numbers, self._computed, groups, gains, note), entered, phonies)
        assert facts is not None and groups is not None
        kind, key = (block, gains), (facts, block, gains)
        known: tuple[Shape, Graph] | None = facts.shapes.get(kind)
        seen = self._seen.get(key, (None if known is None else known[0], []))
        if known is not None and seen is not None and seen[0] is known[0]:
            (shape, kept), found = known, known[0].match(starts, ends)
            if found is not None and not kept.keep_graph and not self._own.issuperset(map(id, found[1])):
                found = None
            owners = None if found is None else owners_like(seen[1], found[0], groups, gains)
            if found is not None and owners is not None:
                if not seen[1]:  # Without nodes, which keep their graph alive.
                    self._seen[key] = shape, [owner._replace(node=None) for owner in owners]
                _, leaves, edges = found
                return kept._replace(
                    entered=entered, phonies=phonies, owners=owners, leaves=leaves, edges=edges, alike=shape
                )
        every = survey(starts, ends, numbers, self._computed, groups, gains, note)
        graph = self._surveyed(every, entered, phonies)
        if key not in self._seen and Shape.known(every):
            shape = Shape(starts, ends, every)
            facts.shapes[kind] = shape, graph._replace(entered=(), phonies=(), owners=(), leaves=(), edges=())
            self._seen[key] = shape, []
        else:
            self._seen[key] = None
        return graph

    def _surveyed(
        self, found: Survey, entered: Sequence[GradientEdge], phonies: Sequence[GradientEdge]
    ) -> Graph:
        leaves = found.leaves
        # Each leaf once, however many paths lead to it: the engine returns its whole gradient each time it is listed.
        keep_graph = found.others or any([id(leaf) not in self._own and leaf.is_leaf for leaf in leaves])
        large = [k for k, leaf in enumerate(leaves) if _is_large(leaf)]
        return Graph(entered, phonies, found.owners, found.custom, leaves, found.edges, keep_graph, found.bound, large)

    def backward(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, leave: Leave | None = None,
        summed: Summed | None = None, early: Early | None = None, parked: ParkedHooks | None = None,
    ) -> tuple[Grads, Grads]:
        """The gradients of the stage's inputs, and of the graph's leaves.

        ``leave`` is called with what each owner leaves at the end, or ``early`` as soon as it is there; ``summed``
        takes gradients of large leaves as soon as they are there. Hooks are ``parked`` for this B, or for the call.
        """
        count, leaves, owners = len(graph.entered), graph.leaves, graph.owners
        kept = [PendingGrad(owner.rule.keep(owner.node)) for owner in owners]
        handles: list[Any] = []
        at_once = None if early is None or graph.custom else early(owners, kept)
        if at_once is not None:
            owners, kept, handles = _at_once(roots, graph, kept, at_once)
        edges = [GradientEdge(owner.node, 0) for owner in owners]
        inputs = (*graph.entered, *graph.edges, *edges, *graph.phonies)
        if not roots or not inputs and not handles:
            return [None] * count, [None] * len(leaves)
        for leaf in leaves:
            if leaf._backward_hooks:
                (self._hooks if parked is None else parked).park(leaf)
        large = [] if summed is None else [k for k in graph.large if leaves[k].requires_grad]
        watched: list[Watch] = []
        found: list[Tensor | None] = []
        try:
            handles += [summed.hook(leaves[k]) for k in large if summed is not None]
            # At a node that runs, autograd captures the gradient from before hooks on its output have changed it.
            if graph.custom or graph.keep_graph or RemovableHandle.next_id != self._registered:
                watched += [_watched(owner.node, graph.custom) for owner in owners]
            found += self._grad(roots, grads, inputs, graph.keep_graph)
        finally:
            for handle in (*handles, *[watch.handle for watch in watched]):  # A kept node would keep its gradient.
                handle.remove()
        for k in large:
            found[count + k] = None  # What is left of it takes no memory.
        for owner, new, grad, watch in zip(owners, kept, found[count + len(leaves) :], watched or repeat(None)):
            if watch is None or not watch.seen:
                _leave(owner, new, grad, None, leave)
            else:
                _leave(owner, new, watch.seen[0][0], watch.versions[0] if watch.versions else None, leave)
        return list(found[:count]), list(found[count : count + len(leaves)])

    def backward_views(
        self, sums: Sums, roots: Sequence[GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> None:
        """Adds the gradients of views to the sums of their leaves; without ``leaves``, of all that are reached."""
        if leaves and all([leaf.requires_grad for leaf in leaves]):  # Views save nothing that could be freed.
            graph = Graph((), (), (), False, leaves, leaves, False)
        else:
            graph = self.graph(roots, (), range(0))
        _, found = self.backward(roots, grads, graph)
        with torch.no_grad():
            sums.add(graph.leaves, found)

    def _grad(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: tuple[Any, ...], keep: bool
    ) -> Sequence[Tensor | None]:
        # Like torch.autograd.grad, without the checks of its arguments.
        try:
            found: Sequence[Tensor | None] = _engine_run_backward(
                tuple(roots), tuple(grads), keep, False, inputs, allow_unreachable=True, accumulate_grad=False
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                add_note(
                    error,
                    f"{self._stage} contains a reentrant torch.utils.checkpoint, which accumulates gradients itself, "
                    "in a schedule: expected use_reentrant=False, or SplitPipe(..., checkpoint='always') instead.",
                )
            raise
        return found


class Watch(NamedTuple):
    """The gradients that a node has received, their versions at that time, and the handle that ends the watch."""

    seen: list[Sequence[Tensor | None]]
    versions: list[int | None]
    handle: Any


def _watched(node: Any, versions: bool) -> Watch:
    """Watches for the gradient of a node's output, as the node receives it; ``versions``: with its version.

    Autograd may pass one gradient to several nodes, and a later one may write to it.
    """
    seen: list[Sequence[Tensor | None]] = []
    found: list[int | None] = []

    def note(grads: Sequence[Tensor | None]) -> None:
        grad = grads[0]
        seen.append(grads)
        found.append(None if grad is None else version_of(grad))

    return Watch(seen, found, node.register_prehook(note if versions else seen.append))


def _edge(x: Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


_lock = ProcessLock()


class _Parked:
    """A placeholder for a parked hook, which does nothing."""

    __slots__ = ("holders", "hook")

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.holders: set[ParkedHooks] = set()

    def __call__(self, *args: object) -> object:
        here = get_ident()
        # Meanwhile, another thread may run backward to the parameter itself.
        if any([holder.thread in (None, here) for holder in list(self.holders)]):
            return None
        return self.hook(*args)


class ParkedHooks:
    """The hooks that one call has parked, in all threads or in a given one."""

    def __init__(self, thread: int | None = None) -> None:
        self.thread = thread
        self._parked: list[tuple[dict[int, Any], int, _Parked]] = []

    def park(self, x: Tensor) -> None:
        """Parks the hooks that a tensor has now."""
        hooks: dict[int, Any] | None = x._backward_hooks
        if not hooks:
            return
        with _lock.lock:
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Adding):  # It belongs to another stage, which runs backward to the leaf meanwhile.
                    continue
                if not isinstance(hook, _Parked):
                    hook = hooks[key] = _Parked(hook)
                if self not in hook.holders:
                    hook.holders.add(self)
                    self._parked.append((hooks, key, hook))

    def put_back(self) -> None:
        """Restores each hook that no other call still parks."""
        if not self._parked:
            return
        with _lock.lock:
            for hooks, key, parked in self._parked:
                parked.holders.discard(self)
                if not parked.holders and hooks.get(key) is parked:  # Otherwise, its handle has removed it.
                    hooks[key] = parked.hook
            self._parked = []
