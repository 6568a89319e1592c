"""Takes the gradients that B finds in the graph of one stage."""
from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core.torch_private import AccumulateGrad, _will_engine_execute_node
from splitpipe.deferral.owners import Note
from splitpipe.deferral.pending import Node, PendingGrad, WeightGroup
from splitpipe.deferral.shape import Ends
from splitpipe.deferral.stash import Stashes
from splitpipe.stage.layers import StageFacts
from splitpipe.training.capture import Capture, Grads, Graph, ParkedHooks
from splitpipe.training.flush import Flush

#: The parameters that a phony leads to, by identity: those of each Flush, in the order of its edges.
Ids = Sequence[Sequence[int]]
#: A block's key and its parameters.
Keyed = tuple[object, Sequence[Tensor]]


class Prepared(Protocol):
    """A checkpointed block that may be recomputed before its backward begins."""

    def prepare(self) -> None:
        """Makes the graph for the next backward."""


class Sink(Protocol):
    """Takes the gradients that the blocks of one stage find."""

    def phony(self, key: object, parameters: Sequence[Tensor]) -> tuple[Tensor, Ids]:
        """A tensor through whose node autograd runs if it needs the gradients of a block's parameters."""

    def graph(
        self, i: int, roots: Sequence[GradientEdge], entered: Sequence[GradientEdge], numbers: range,
        block: StageFacts | None = None,
    ) -> Graph:
        """The graph of a microbatch on a recomputed block or stage, with these facts; None: on the whole stage."""

    def made(self, i: int, block: Prepared) -> None:
        """Called with each checkpointed block that has run and is a whole stage."""

    def wanted(self, phony: Any, ids: Ids) -> set[int] | None:
        """The parameters that autograd, which has reached a phony's node, will reach; None: all."""

    def backward_block(
        self, i: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, wanted: set[int] | None,
        now: bool = False,
    ) -> Grads:
        """The gradients of what entered; those of parameters that are ``wanted`` (None: all) are taken.

        ``now``: nothing that takes memory should wait for W.
        """


def needs(node: Any) -> bool:
    """True if the running backward reaches a node. The engine doesn't know this for leaves."""
    return node is not None and (type(node) is AccumulateGrad or _will_engine_execute_node(node))


def used_by(graph: Graph) -> dict[int, Tensor]:
    """The leaves that a graph leads to, by identity."""
    every = [*graph.leaves, *[x for owner in graph.owners for x in owner.group.parameters]]
    return {id(x): x for x in every}


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
    """Gives gradients to the parameters of one stage's blocks, through Flush."""

    def __init__(self, own: Any, stashes: Stashes) -> None:
        #: Called with how gradients of parameters are computed; None if that is known.
        self.note: Note | None = None
        #: Those of the stage, once it has begun.
        self.facts: StageFacts | None = None
        self.stashes = stashes
        #: Those of the stage.
        self.device = stashes.streams.device
        self._capture = Capture(own, ParkedHooks())
        self._phonies: dict[object, tuple[Tensor, Ids]] = {}
        self._of_graphs: dict[object, tuple[Tensor, Ids]] = {}
        self._used: dict[object, tuple[dict[int, Tensor], bool]] = {}
        self._lock = threading.Lock()

    def phony(self, key: object, parameters: Sequence[Tensor]) -> tuple[Tensor, Ids]:
        """The phony of a block, whose Flush is made once per call."""
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

    def made(self, i: int, block: Prepared) -> None:
        """Nothing: autograd determines when a block is recomputed."""

    def wanted(self, phony: Any, ids: Ids) -> set[int] | None:
        """The same for each microbatch of one backward."""
        known = self.stashes.open().wanted
        if phony not in known:
            known[phony] = _wanted(phony, ids)
        return known[phony]

    def phony_of(self, graph: Graph, blocks: Sequence[Keyed] = ()) -> tuple[Tensor, Ids]:
        """A phony for a graph, through those of the blocks in it. It leads to the same parameters as the graph.

        Otherwise, autograd would reach other parameters too, and call what is registered for their gradients.
        """
        own = graph.alike
        if own is None:
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

    def used(self, graph: Graph) -> tuple[dict[int, Tensor], bool]:
        """The leaves that a graph leads to, by identity, and whether all of them are on the stage's device."""
        found = None if graph.alike is None else self._used.get(graph.alike)
        if found is None:
            used = used_by(graph)
            found = used, all([x.device == self.device for x in used.values()])
            if graph.alike is not None:
                self._used[graph.alike] = found
        return found

    def graph(
        self, i: int, roots: Sequence[GradientEdge], entered: Sequence[GradientEdge], numbers: range,
        block: StageFacts | None = None, seen: list[tuple[Tensor, bool, str]] | None = None, ends: Ends | None = None,
    ) -> Graph:
        """The graph, with the weights whose gradients wait; notes for the report go to ``seen``, if given."""
        stashes = self.stashes
        note = self.note if seen is None or self.note is None else lambda *each: seen.append(each)
        return self._capture.graph(
            roots, entered, numbers, groups=stashes, gains=stashes.gains(i), note=note, ends=ends,
            facts=self.facts if block is None else block, block=block is not None,
        )

    def backward_block(
        self, i: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], graph: Graph, wanted: set[int] | None,
        now: bool = False,
    ) -> Grads:
        """B, with parameters' hooks parked in this thread, since Flush returns their gradients. Grad mode is off."""
        stash = self.stashes.open() if graph.leaves or graph.owners else None
        hooks = ParkedHooks(threading.get_ident())
        left: list[tuple[WeightGroup, PendingGrad]] = []

        def leave(group: WeightGroup, new: PendingGrad) -> None:
            if wanted is None or not wanted.isdisjoint(map(id, group.parameters)):
                left.append((group, new))

        try:
            found, own = self._capture.backward(
                roots, grads, graph, leave, parked=hooks,
                early=None if stash is None or wanted is not None else partial(stash.early, now),
            )
        finally:
            hooks.put_back()
        if stash is not None:
            stash.leave(left, now)
            stash.sums.add(graph.leaves, own)
        return found


def _wanted(phony: Any, ids: Ids) -> set[int] | None:
    wanted, every = set[int](), True
    for node, own in zip([node for node, _ in phony.next_functions] if len(ids) > 1 else [phony], ids):
        after = node.next_functions
        if len(after) != len(own):  # No Flush.
            return None
        found = [leaf for leaf, (node, _) in zip(own, after) if needs(node)]
        wanted.update(found)
        every = every and len(found) == len(own)
    return None if every else wanted
