"""Drop-in: the stash of what B leaves for W, until a Flush returns the weight gradients to autograd.

Autograd counts the edges: a Flush (``training.flush``) runs once, after every B that stashes for it, and AccumulateGrad
receives the whole gradient at once, as hooks and DDP expect. With the sequence number 0, it comes after every other
ready node. On the CPU, where it can't run concurrently with others, it keeps its own number, and runs as soon as it is
ready, so that a gradient that is added to an earlier one is freed soon. (If the user sets a limit, it comes last there
too.)

A stash belongs to one backward call, a graph task of autograd's engine, and lives as long as the task: only the engine
keeps it, as a callback of the task. So what a failed backward has stashed is freed with the failure, the next backward
on the same graph starts with nothing, and two that run at the same time don't see each other's. With a single stash for
all tasks, the next backward would also count what a failed one left.

No Python code runs when a stash is freed with its task: this may happen in the main thread, where an interrupt that
came meanwhile would be raised in that code, and be lost. So a weak reference has no callback, and a task that ends well
leaves nothing to finalize.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.core import stream
from splitpipe.core.graph import LAST, rank
from splitpipe.core.thread_state import without_autocast
from splitpipe.core.torch_private import _current_graph_task_id, queue_callback
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.function import WeightGradients
from splitpipe.deferral.owners import Owner, Way, Weight, edge_of
from splitpipe.deferral.pending import PendingGrad, WeightGroup, without_graph
from splitpipe.deferral.streams import BackwardStreams, Reads

_alias: Any = torch.ops.aten.alias.default
#: The bytes that may be kept on the CPU beyond the free ones: those of kernels that run faster than they are called.
_SMALL = 2**16


#: The bytes that the nodes of a microbatch may keep at most until B has passed all of them.
_MUCH = 2**22
#: The bytes that may wait during recomputations, and those of groups that are computed together.
_LITTLE = 2**22
#: Runs backward from edges, with their gradients, to leaves, and adds to the sums of these.
Backward = Callable[[Sums, Sequence[GradientEdge], Sequence[Tensor], Sequence[Tensor]], None]


@lru_cache
def _most(device: torch.device) -> int:
    """The number of bytes that may be kept on an accelerator beyond the free ones."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.total_memory) // 16


class Goal(NamedTuple):
    """Where the gradient of a weight goes: to a leaf, or to the edge of a view of it; ``turned``: transposed."""

    leaf: Tensor
    edge: GradientEdge | None
    turned: bool


class Stashes:
    """The stashes of one stage in one call of the model, by graph task, and the groups of its weights; see Stash."""

    def __init__(
        self, streams: BackwardStreams, limit: int | None, names: Mapping[int, str], backward: Backward
    ) -> None:
        self.streams = streams
        self.limit = limit
        self.backward = backward
        self.goals: dict[WeightGroup, list[Goal | None]] = {}
        self._names = names
        self._known: dict[object, WeightGroup] = {}
        self.ways: dict[Any, Way] = {}
        self._alive: dict[int, weakref.ref[Stash]] = {}

    def gains(self, microbatch: int) -> tuple[bool, bool]:
        """W can run during B on an accelerator, and gathers several microbatches on any device."""
        return self.streams.side is not None, True

    def known(self, key: object) -> WeightGroup | None:
        """A group that other microbatches use too."""
        return self._known.get(key)

    def make(self, key: object | None, function: WeightGradients, weights: Sequence[Weight | None]) -> WeightGroup:
        """A group for W; without a key, for one microbatch. A weight is None if W has no gradient to compute for it."""
        leaves = [None if weight is None else weight.leaf for weight in weights]
        kinds = [None if weight is None else weight.kind for weight in weights]
        group = WeightGroup(function, leaves, kinds, self._names)
        self.goals[group] = [
            None if weight is None
            else Goal(weight.leaf, None if weight.edge is None else edge_of(weight), weight.turned)
            for weight in weights
        ]
        if key is not None:
            self._known[key] = group
        return group

    def find(self) -> Stash | None:
        """The stash of the graph task that this thread runs."""
        found = self._alive.get(_current_graph_task_id())
        return None if found is None else found()

    def open(self) -> Stash:
        """The stash of the running graph task, created the first time."""
        stash = self.find()
        if stash is None:
            for task, other in list(self._alive.items()):
                if other() is None:
                    self._alive.pop(task, None)  # Another thread may have done it.
            stash = Stash(self)
            self._alive[_current_graph_task_id()] = weakref.ref(stash)
            queue_callback(stash.close)
        return stash

    def make_room(self) -> None:
        """Computes the pending gradients of the running graph task."""
        stash = self.find()
        if stash is not None:
            stash.drain()

    def flushing(self, weights: Sequence[Tensor], make: Callable[..., Tensor]) -> Tensor:
        """A phony from the node that ``make`` makes, which returns the gradients of views of these weights.

        Autograd reports whether it will reach a view's node.
        """
        streams = self.streams
        # AccumulateGrad belongs to the stream that first asks for it, and expects its gradients on that.
        with stream.use(streams.compute):
            views = [_alias(weight) for weight in weights]  # Unlike a view's, its node accepts any gradient.
        with stream.use(streams.side):
            phony = make(*views)
        if streams.side is not None or self.limit is not None:
            for each in (phony, *views):
                rank(each, LAST)
        return phony


@dataclass(slots=True)
class PendingGroup:
    """The sums of a group's gradients so far, its pending ones, and how many bytes of them count against the limit."""

    totals: list[Total | None]
    size: int
    pending: list[PendingGrad] = field(default_factory=list)


class Stash:
    """The pending gradients of one backward call, on one stage; ``limit``: how many bytes to keep, at most.

    Ordinary autograd allocates every weight gradient at the first microbatch. So, if the user sets no limit, each group
    of weights may keep as many bytes as its gradients will take: large weights that are used by few rows wait for all
    microbatches, and take no more memory than with autograd. Beyond that, the CPU keeps next to nothing, and an
    accelerator, where W can run during B, a sixteenth of its memory.
    """

    def __init__(self, stashes: Stashes) -> None:
        self._streams = streams = stashes.streams
        self._goals, self._backward = stashes.goals, stashes.backward
        #: The parameters, by identity, that the task reaches through a node; None: all.
        self.wanted: dict[Any, set[int] | None] = {}
        #: The sums of leaves that have been computed so far.
        self.sums = Sums()
        limit = stashes.limit
        self._grants = limit is None
        if limit is None:
            limit = _SMALL if streams.device.type == "cpu" else _most(streams.device)
        self._limit = limit
        self._groups: dict[WeightGroup, PendingGroup] = {}
        self._of: dict[int, list[WeightGroup]] = {}  # By the identity of a leaf.
        self._full: dict[WeightGroup, PendingGroup] = {}  # Groups whose pending gradients count against the limit.
        self._size = 0
        self._reads = Reads(streams)
        # After a failed backward, the engine drops its callbacks: tensors that W still reads are released all the same.
        self._failed = weakref.finalize(self, self._reads.release)
        self._failed.atexit = False

    def early(
        self, now: bool, owners: Sequence[Owner], kept: Sequence[PendingGrad]
    ) -> Callable[[WeightGroup, PendingGrad], None] | None:
        """Takes what nodes leave as it comes; None if it may wait until B ends.

        It may if it is small, or no larger than the sums, or, unless it must be computed ``now``, if there is room for
        it.
        """
        size = 2 * sum([new.size for new in kept])  # With the gradients that they will receive.
        if self._grants:
            size -= sum({owner.group: owner.group.size for owner in owners}.values())
        room = min(self._limit, _MUCH) if now else self._limit - self._size

        def leave(group: WeightGroup, new: PendingGrad) -> None:
            self.leave([(group, new)], now)

        return leave if size > room else None

    def leave(self, left: Sequence[tuple[WeightGroup, PendingGrad]], now: bool) -> None:
        """Takes what the nodes of a graph have left in B, where grad mode is off.

        ``now``: computes it immediately, unless what waits takes little memory.
        """
        streams = self._streams
        for _, new in left:
            new.ctx.saved_for_weight = without_graph(new.ctx.saved_for_weight)
        if streams.side is not None and left:
            for x in [x for _, new in left for x in new.tensors()]:  # A layer may have made it on a different stream.
                stream.hold(x, streams.compute)
            stream.wait(streams.side, streams.compute)
        groups = {group: self._added(group, new) for group, new in left}
        if now and self._much_waits:
            self._compute_early({group: found for group, found in groups.items() if found.size > 0})
        self._shrink()

    def _added(self, group: WeightGroup, new: PendingGrad) -> PendingGroup:
        found = self._groups.get(group)
        if found is None:
            totals = [None if kind is None else Total(*kind) for kind in group.kinds]
            found = self._groups[group] = PendingGroup(totals, -group.size if self._grants else 0)
            self._size += found.size
            for leaf in group.parameters:
                self._of.setdefault(id(leaf), []).append(group)
        found.pending.append(new)
        found.size += new.size
        self._size += new.size
        if found.size > 0:
            self._full[group] = found
        return found

    def _shrink(self) -> None:
        while self._size > self._limit:
            self._compute_early(dict([max(self._groups.items(), key=lambda entry: entry[1].size)]))

    def gradients(self, leaves: Sequence[Tensor]) -> list[Total | None]:
        """The sums of leaves, which are released. Called on the side stream."""
        goals: list[tuple[Goal, Total]] = []
        with torch.no_grad():
            for some in self._few_at_once([group for leaf in leaves for group in self._of.pop(id(leaf), ())]):
                goals += self._flush(some)
            stream.wait(self._streams.side, self._streams.compute)  # B has added to sums.
            for goal, total in goals:
                if goal.edge is None:
                    self.sums.of(goal.leaf).join(total)
        self._go_on([(goal, total) for goal, total in goals if goal.edge is not None])
        return [self.sums.take(leaf) for leaf in leaves]

    def _go_on(self, goals: Sequence[tuple[Goal, Total]]) -> None:
        """Passes the sums of views on to their leaves."""
        if not goals:
            return
        edges = [goal.edge for goal, _ in goals if goal.edge is not None]
        grads = [total.value.t() if goal.turned else total.value for goal, total in goals if total.value is not None]
        leaves = {id(goal.leaf): goal.leaf for goal, _ in goals}
        self._backward(self.sums, edges, grads, [*leaves.values()])
        del grads
        for goal, total in goals:
            self.sums.of(goal.leaf).take_over(total)

    def _few_at_once(self, groups: Sequence[WeightGroup]) -> Iterator[dict[WeightGroup, PendingGroup]]:
        """Takes groups out, small ones together: ordering the streams may take the host longer than their kernels."""
        some: dict[WeightGroup, PendingGroup] = {}
        size = 0
        for group in groups:
            found = self._groups.pop(group, None)
            if found is None:  # Flushed for another of its leaves.
                continue
            own = found.size + 2 * group.size
            if some and size + own > _LITTLE:
                yield some
                some, size = {}, 0
            some[group], size = found, size + own
        if some:
            yield some

    def _flush(self, groups: Mapping[WeightGroup, PendingGroup]) -> list[tuple[Goal, Total]]:
        """The sums of groups' gradients, including all that was stashed for them."""
        pending = {group: found for group, found in groups.items() if found.pending}
        if pending:
            self._compute(pending)
        # After an error in another thread, the engine drops them: their memory belongs to the compute stream.
        self._reads.release()
        return [
            (goal, total) for group, found in groups.items() for goal, total in zip(self._goals[group], found.totals)
            if goal is not None and total is not None and total.value is not None
        ]

    def drain(self) -> None:
        """Computes what waits and takes memory, if it is much: W of several microbatches is faster."""
        if self._much_waits:
            self._compute_early({**self._full})
        self._reads.release()

    @property
    def _much_waits(self) -> bool:
        return sum([found.size for found in self._full.values()]) > _LITTLE

    def close(self) -> None:
        """Ends the graph task."""
        self._reads.release()
        self._failed.detach()

    def _compute_early(self, groups: Mapping[WeightGroup, PendingGroup]) -> None:
        if groups:
            with stream.use(self._streams.side):
                self._compute(groups)

    def _compute(self, groups: Mapping[WeightGroup, PendingGroup]) -> None:
        compute, side = self._streams.compute, self._streams.side
        taken: list[tuple[WeightGroup, PendingGroup, list[PendingGrad]]] = []
        for group, found in groups.items():
            self._size -= found.size
            taken.append((group, found, found.pending))
            found.pending, found.size = [], 0
            self._full.pop(group, None)
        self._streams.allocate([total for _, found, _ in taken for total in found.totals if total is not None])
        try:
            with without_autocast():
                for group, found, pending in taken:
                    group.compute(found.totals, pending)
        except BaseException:
            stream.wait(compute, side)  # The sums' memory belongs to the compute stream, and is free now.
            raise
        finally:
            if side is not None:
                self._reads.add([x for _, _, pending in taken for each in pending for x in each.tensors()])
