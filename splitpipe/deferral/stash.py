"""Drop-in: what B leaves for W, and Flush, which brings the weight gradients back into autograd.

     parameter ─> AccumulateGrad
       ^
     Flush               made when a pass first uses the weights; computes what was stashed for them, and returns it
       ^ phony, one edge a microbatch
     Split(i)            backward: the input gradient, and the layer's input and output gradient into the stash

Autograd counts the edges: Flush runs once, when every B that stashes for it is done, and AccumulateGrad has the whole
gradient at once, as hooks and DDP expect. With the sequence number 0 it comes after every node that is ready. On the
CPU, where it can't run beside another one, it keeps its own number, and comes as soon as it is ready: then a gradient
that is added to an earlier one is soon gone. (With a limit of the user's it is the last one there, too.)

A stash belongs to one backward call, a graph task of the engine's, and lives as long as that: the engine alone holds
it, as a callback of the task. So what a failed backward has stashed goes with the failure, the next one on the same
graph starts with nothing, and two that run at once don't see each other's. One stash for all tasks would count what a
failed backward left once more, with the next.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from splitpipe.core import stream
from splitpipe.core.graph import LAST, rank
from splitpipe.core.thread_state import without_autocast
from splitpipe.core.torch_private import _current_graph_task_id, _will_engine_execute_node
from splitpipe.deferral.accumulator import Room, Total
from splitpipe.deferral.pending import Node, PendingGrad, WeightGroup
from splitpipe.deferral.streams import Held, Lane

#: How many bytes may be held back on the CPU beyond what is free: those of kernels that are sooner run than called.
_SMALL = 2**16


@lru_cache
def _most(device: torch.device) -> int:
    """How many bytes may be held back on an accelerator beyond what is free."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.total_memory) // 16


@dataclass
class Stashes:
    """The stashes of one stage in one call of the model, by graph task; ``limit`` and ``lane`` are those of a Stash."""

    lane: Lane
    limit: int | None
    _alive: weakref.WeakValueDictionary[int, Stash] = field(default_factory=weakref.WeakValueDictionary)

    def find(self) -> Stash | None:
        """The stash of the graph task that this thread runs."""
        return self._alive.get(_current_graph_task_id())

    def open(self) -> Stash:
        """The stash of the running graph task, made the first time; see ``find``."""
        stash = self.find()
        if stash is None:
            stash = self._alive[_current_graph_task_id()] = Stash(self.lane, self.limit)
            Variable._execution_engine.queue_callback(stash.close)
        return stash

    def phony(self, group: WeightGroup, weights: Sequence[Tensor]) -> Tensor:
        """See PendingStore: the phony whose backward flushes the group."""
        lane = self.lane
        if lane.side is not None:
            # AccumulateGrad belongs to the stream that first asks for it, and expects its gradients from there.
            with stream.use(lane.compute):
                weights = [weight.view_as(weight) for weight in weights]
                for weight in weights:
                    rank(weight, LAST)
        with stream.use(lane.side):
            phony: Tensor = Flush.apply(self, group, *weights)
        if lane.side is not None or self.limit is not None:
            rank(phony, LAST)
        return phony

    def microbatch(self, number: int, now: bool) -> MicrobatchStash:
        """See PendingStore."""
        return MicrobatchStash(self, now)

    def make_room(self) -> None:
        """See PendingStore: computes the pending gradients of the running graph task."""
        stash = self.find()
        if stash is not None:
            stash.drain()


class MicrobatchStash:
    """Puts pending gradients into the stash of the running graph task.

    Args:
        stashes: of the stage.
        now: whether to compute them at once, unless what waits is free.
    """

    __slots__ = ("_now", "_stashes", "fills")
    gathers = True
    leads = True

    def __init__(self, stashes: Stashes, now: bool) -> None:
        self._stashes = stashes
        self._now = now
        self.fills = stashes.lane.side is not None

    def put(self, group: WeightGroup, ctx: Any, grad: Tensor, phony: Any) -> None:
        """See MicrobatchStore."""
        if _will_engine_execute_node(phony):
            self._stashes.open().put(group, ctx, grad, self._now)


class PendingGroup:
    """The pending gradients of a group of weights, and the sums so far.

    Attributes:
        size: how many bytes count against the stash's limit: those of the first ones, up to ``free``, do not.
    """

    __slots__ = ("pending", "size", "totals")

    def __init__(self, group: WeightGroup, free: int, room: Room | None) -> None:
        self.totals = [None if kind is None else Total(*kind, room) for kind in group.kinds]
        self.pending: list[PendingGrad] = []
        self.size = -free


class Stash:
    """The pending gradients of one backward call, on one stage.

    A fused backward has the gradients of all weights from the first microbatch on. So without a limit of the user's,
    what waits for a gradient that is not there yet is free, up to the bytes that the gradient will take: many weights
    that are used by few rows wait for all microbatches, and no memory is taken for that. Beyond it, the CPU holds
    next to nothing back, and an accelerator, where W can run beside B, a sixteenth of its memory.

    Args:
        lane: the stage's streams.
        limit: how many bytes to hold back; None: as above.
    """

    def __init__(self, lane: Lane, limit: int | None) -> None:
        self._lane = lane
        self._grants = limit is None
        if limit is None:
            limit = _SMALL if lane.device.type == "cpu" else _most(lane.device)
        self._limit = limit
        self._groups: dict[WeightGroup, PendingGroup] = {}
        self._size = 0
        self._held = Held(lane)
        # After a failed backward the engine drops its callbacks: what W still reads is let go of all the same.
        weakref.finalize(self, self._held.release).atexit = False

    def put(self, group: WeightGroup, ctx: Any, grad: Tensor, now: bool) -> None:
        """Takes what a call has left; ``now``: computes it at once, unless what waits is free."""
        after = None
        if self._lane.side is not None:
            if self._lane.apart:
                self._lane.join((grad, *ctx.saved_for_weight))
            after = self._lane.mark()
        new = PendingGrad(ctx, grad, after)
        found = self._groups.get(group)
        if found is None:
            room = None if self._lane.side is None else self._lane.room
            found = self._groups[group] = PendingGroup(group, group.size if self._grants else 0, room)
            self._size += found.size
        found.pending.append(new)
        found.size += new.size
        self._size += new.size
        if now and found.size > 0:
            self._compute_early(group, found)
        while self._size > self._limit:
            self._compute_early(*max(self._groups.items(), key=lambda entry: entry[1].size))

    def flush(self, group: WeightGroup) -> Sequence[Total | None]:
        """The sums of a group's gradients, of all that was stashed for them. Called on the side stream."""
        found = self._groups.pop(group, None)
        if found is None:
            return ()
        if found.pending:
            self._compute(group, found)
        return found.totals

    def drain(self) -> None:
        """Computes all that is held back and takes memory."""
        for group, found in self._groups.items():
            if found.size > 0:
                self._compute_early(group, found)
        self._held.release()

    def close(self) -> None:
        """The graph task is over."""
        self._held.release()

    def _compute_early(self, group: WeightGroup, found: PendingGroup) -> None:
        with stream.use(self._lane.side):
            self._compute(group, found)

    def _compute(self, group: WeightGroup, found: PendingGroup) -> None:
        self._size -= found.size
        pending, found.pending, found.size = found.pending, [], 0
        # The compute stream is through with the earlier ones, too.
        stream.wait_for(self._lane.side, pending[-1].after)
        for each in pending:
            stream.spent(each.after)
        try:
            with without_autocast():
                group.compute(found.totals, pending)
        except BaseException:
            stream.wait(self._lane.compute, self._lane.side)  # What the sums have is compute's, and is free now.
            raise
        finally:
            if self._lane.side is not None:
                self._hold([x for each in pending for x in each.tensors()])

    def _hold(self, tensors: list[Tensor]) -> None:
        if torch.is_grad_enabled():  # The gradient's own nodes save them, for a second backward on the side stream.
            for x in tensors:
                stream.hold(x, self._lane.side)
        self._held.hold(tensors)


class Flush(Node):
    """A phony; in backward, the gradients of a group's weights."""

    @staticmethod
    def forward(ctx: Any, stashes: Stashes, group: WeightGroup, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.stashes, ctx.group = stashes, group
        return torch.empty(0, device=stashes.lane.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        stash = ctx.stashes.find()
        # Nothing was stashed if all output gradients were undefined.
        totals = [] if stash is None else stash.flush(ctx.group)
        return None, None, *([total.value for total in totals if total] or [None] * (len(ctx.needs_input_grad) - 2))
