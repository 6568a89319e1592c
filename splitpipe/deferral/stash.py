"""Drop-in: the stash of what B leaves for W, and Flush, which brings the weight gradients back into autograd.

     parameter ─> AccumulateGrad
       ^
     Flush               made when a pass first uses the weights; computes what was stashed for them, and returns it
       ^ phony, one edge a microbatch
     Split(i)            backward: the input gradient, and the layer's input and output gradient into the stash

Autograd counts the edges: Flush runs once, when every B that stashes for it is done, and AccumulateGrad has the whole
gradient at once, as hooks and DDP expect. With the sequence number 0 it comes after every node that is ready. On the
CPU, where it can't run beside another one, it keeps its own number, and comes as soon as it is ready: then a gradient
that is added to an earlier one is soon gone. (With a limit of the user's it is the last one there, too.)

A stash belongs to one backward call, a graph task of the engine's, and lives as long as that: the engine alone keeps
it, as a callback of the task. So what a failed backward has stashed goes with the failure, the next one on the same
graph starts with nothing, and two that run at once don't see each other's. One stash for all tasks would count what a
failed backward left once more, with the next.

No code of Python's runs when a stash goes with its task: it may go in the main thread, where an interrupt that came
meanwhile would be raised in that code, and be lost. So a weak reference has no callback, and a task that ends well
leaves nothing to finalize.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.graph import LAST, rank
from splitpipe.core.thread_state import without_autocast
from splitpipe.core.torch_private import _current_graph_task_id, queue_callback
from splitpipe.deferral.accumulator import Total
from splitpipe.deferral.pending import Node, PendingGrad, WeightGroup
from splitpipe.deferral.streams import BackwardStreams, Reads

_alias: Any = torch.ops.aten.alias.default
#: The bytes that may be held back on the CPU beyond the free ones: of kernels that run faster than they are called.
_SMALL = 2**16


@lru_cache
def _most(device: torch.device) -> int:
    """The number of bytes that may be held back on an accelerator beyond the free ones."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.total_memory) // 16


@dataclass
class Stashes:
    """The stashes of one stage in one call of the model, by graph task: a PendingStore; see Stash for ``limit``."""

    streams: BackwardStreams
    limit: int | None
    reaches_weights = True
    by_graph = False
    _alive: dict[int, weakref.ref[Stash]] = field(default_factory=dict)

    def gains(self, microbatch: int) -> tuple[bool, bool]:
        """W runs beside B on an accelerator, and gathers several microbatches anywhere."""
        return self.streams.side is not None, True

    def find(self) -> Stash | None:
        """The stash of the graph task that this thread runs."""
        found = self._alive.get(_current_graph_task_id())
        return None if found is None else found()

    def phony(self, group: WeightGroup, weights: Sequence[Tensor]) -> Tensor:
        """The phony whose backward flushes the group."""
        return self.flushing(weights, partial(Flush.apply, self, group))

    def flushing(self, weights: Sequence[Tensor], make: Callable[..., Tensor], viewed: bool = False) -> Tensor:
        """A phony by the node that ``make`` makes, which gives the gradients of these weights, or of views of them.

        ``viewed``: of views in any case, whose nodes autograd says of whether it will come to them.
        """
        streams = self.streams
        if streams.side is not None or viewed:
            # AccumulateGrad belongs to the stream that first asks for it, and expects its gradients from there.
            with stream.use(streams.compute):
                weights = [_alias(weight) for weight in weights]  # Unlike a view's, its node takes any gradient.
                for weight in weights:
                    rank(weight, LAST)
        with stream.use(streams.side):
            phony = make(*weights)
        if streams.side is not None or self.limit is not None:
            rank(phony, LAST)
        return phony

    def put(self, group: WeightGroup, ctx: Any, grad: Tensor | None, microbatch: int, now: bool) -> None:
        """Puts it into the stash of the running graph task."""
        self.open().put(group, ctx, grad, now)

    def open(self) -> Stash:
        """The stash of the running graph task, made the first time."""
        stash = self.find()
        if stash is None:
            for task, other in list(self._alive.items()):
                if other() is None:
                    self._alive.pop(task, None)  # Another thread may have done it.
            stash = self.made()
            self._alive[_current_graph_task_id()] = weakref.ref(stash)
            queue_callback(stash.close)
        return stash

    def made(self) -> Stash:
        """A new one."""
        return Stash(self.streams, self.limit)

    def make_room(self) -> None:
        """Computes the pending gradients of the running graph task."""
        stash = self.find()
        if stash is not None:
            stash.drain()


@dataclass(slots=True)
class PendingGroup:
    """The sums of a group's gradients so far, its pending ones, and how many bytes of them count against the limit."""

    totals: list[Total | None]
    size: int
    pending: list[PendingGrad] = field(default_factory=list)


class Stash:
    """The pending gradients of one backward call, on one stage; ``limit``: how many bytes to hold back, at most.

    Ordinary autograd allocates every weight gradient at the first microbatch. So without a limit of the user's, each
    group of weights may hold back as many bytes as its gradients will take: many weights that are used by few rows wait
    for all microbatches, and take no more memory than autograd. Beyond that, the CPU holds next to nothing back, and an
    accelerator, where W can run beside B, a sixteenth of its memory.
    """

    def __init__(self, streams: BackwardStreams, limit: int | None) -> None:
        self._streams = streams
        self._grants = limit is None
        if limit is None:
            limit = _SMALL if streams.device.type == "cpu" else _most(streams.device)
        self._limit = limit
        self._groups: dict[WeightGroup, PendingGroup] = {}
        self._size = 0
        self._reads = Reads(streams)
        # After a failed backward the engine drops its callbacks: what W still reads is let go of all the same.
        self._failed = weakref.finalize(self, self._reads.release)
        self._failed.atexit = False

    def put(self, group: WeightGroup, ctx: Any, grad: Tensor | None, now: bool) -> None:
        """Takes what a call has left; ``now``: computes it at once, unless what waits is free."""
        streams, after = self._streams, None
        if streams.side is not None:
            if streams.on_other_stream:
                streams.join([x for x in (grad, *ctx.saved_for_weight) if x is not None])
            after = stream.mark(streams.compute)
        found = self._added(group, PendingGrad(ctx, grad, after))
        if now and found.size > 0:
            self._compute_early({group: found})
        self._shrink()

    def _added(self, group: WeightGroup, new: PendingGrad) -> PendingGroup:
        found = self._groups.get(group)
        if found is None:
            allocate = None if self._streams.side is None else self._streams.allocate
            totals = [None if kind is None else Total(*kind, allocate) for kind in group.kinds]
            found = self._groups[group] = PendingGroup(totals, -group.size if self._grants else 0)
            self._size += found.size
        found.pending.append(new)
        found.size += new.size
        self._size += new.size
        return found

    def _shrink(self) -> None:
        while self._size > self._limit:
            self._compute_early(dict([max(self._groups.items(), key=lambda entry: entry[1].size)]))

    def flush(self, group: WeightGroup) -> Sequence[Total | None]:
        """The sums of a group's gradients, of all that was stashed for them. Called on the side stream."""
        found = self._groups.pop(group, None)
        if found is None:
            return ()
        if found.pending:
            self._compute({group: found})
        # After an error in another thread the engine drops them: their memory is of the compute stream.
        self._reads.release()
        return found.totals

    def drain(self) -> None:
        """Computes all that is held back and takes memory."""
        self._compute_early({group: found for group, found in self._groups.items() if found.size > 0})
        self._reads.release()

    def close(self) -> None:
        """The graph task is over."""
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
            # The compute stream is through with the earlier ones, too.
            stream.wait_for(side, found.pending[-1].after)
            for each in found.pending:
                stream.spent(each.after)
            found.pending, found.size = [], 0
        try:
            with without_autocast():
                for group, found, pending in taken:
                    group.compute(found.totals, pending)
        except BaseException:
            stream.wait(compute, side)  # The sums' memory is of the compute stream, and is free now.
            raise
        finally:
            if side is not None:
                tensors = [x for _, _, pending in taken for each in pending for x in each.tensors()]
                if torch.is_grad_enabled():  # Its own nodes save them, for a second backward on the side stream.
                    for x in tensors:
                        stream.hold(x, side)
                self._reads.add(tensors)


class Flush(Node):
    """A phony; in backward, the gradients of a group's weights."""

    @staticmethod
    def forward(ctx: Any, stashes: Stashes, group: WeightGroup, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.stashes, ctx.group = stashes, group
        return torch.empty(0, device=stashes.streams.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        stash = ctx.stashes.find()
        totals = [] if stash is None else stash.flush(ctx.group)
        if not totals:  # Nothing was stashed, as all output gradients were undefined.
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *[total.value for total in totals if total is not None]
