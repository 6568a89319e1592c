"""What B leaves for W, and Flush, which brings the weight gradients back into autograd.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch.autograd import Variable

from splitpipe.core import stream
from splitpipe.core.graph import LAST, rank
from splitpipe.core.note import add_note
from splitpipe.core.thread_state import without_autocast
from splitpipe.deferral.accumulator import Room, Total
from splitpipe.deferral.node import Node
from splitpipe.deferral.pending import Part, Slot
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
    """The stashes of one stage in one pass, by graph task.

    Args:
        lane: the stage's streams.
        limit: how many bytes a stash may hold back; None: as a Stash has it.
    """

    lane: Lane
    limit: int | None
    _alive: weakref.WeakValueDictionary[int, Stash] = field(default_factory=weakref.WeakValueDictionary)
    _last: tuple[int, Callable[[], Stash | None]] = -1, lambda: None  # Most calls ask for the same one again.

    def find(self) -> Stash | None:
        """The stash of the graph task that this thread runs."""
        return self._alive.get(_current_graph_task_id())

    def open(self) -> Stash:
        """As ``find``; the first time, the stash is made."""
        task = _current_graph_task_id()
        last, found = self._last
        stash = found() if last == task else None
        if stash is not None:
            return stash
        stash = self._alive.get(task)
        if stash is None:
            stash = self._alive[task] = Stash(self.lane, self.limit)
            Variable._execution_engine.queue_callback(stash.close)
        self._last = task, weakref.ref(stash)
        return stash

    def phony(self, slot: Slot, weights: Sequence[Tensor]) -> Tensor:
        """As of a Deposit: the phony whose backward flushes the slot."""
        return flush(self, slot, weights)

    def sink(self, microbatch: int, now: bool) -> Stashing:
        """As of a Deposit."""
        return Stashing(self, now)

    def make_room(self) -> None:
        """Computes what the running graph task holds back: a microbatch is about to be run again, and needs memory."""
        stash = self.find()
        if stash is not None:
            stash.drain()


class Stashing:
    """Puts parts into the stash of the running graph task.

    Args:
        stashes: of the stage.
        now: whether to compute their gradients at once, unless what waits is free.
    """

    __slots__ = ("_now", "_stashes", "fills")
    gathers = True
    leads = True

    def __init__(self, stashes: Stashes, now: bool) -> None:
        self._stashes = stashes
        self._now = now
        self.fills = stashes.lane.side is not None

    def put(self, slot: Slot, ctx: Any, grad: Tensor, phony: Any) -> None:
        """As of a Sink."""
        if _will_engine_execute_node(phony):
            self._stashes.open().put(slot, ctx, grad, self._now)


class Pile:
    """What is held back for a slot, and the sums so far.

    Args:
        slot: of the weights.
        free: how many bytes of its first parts count for nothing.
        room: of the sums.
    """

    __slots__ = ("parts", "size", "totals")

    def __init__(self, slot: Slot, free: int, room: Room | None) -> None:
        self.totals = [None if kind is None else Total(*kind, room) for kind in slot.kinds]
        self.parts: list[Part] = []
        #: How many bytes count against the stash's limit.
        self.size = -free

    def take(self) -> list[Part]:
        """The parts, which it has no longer."""
        parts, self.parts, self.size = self.parts, [], 0
        return parts


class Stash:
    """What one backward call of one stage holds back.

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
        self._piles: dict[Slot, Pile] = {}
        self._size = 0
        self._held = Held(lane)
        # After a failed backward the engine drops its callbacks: what W still reads is let go of all the same.
        weakref.finalize(self, self._held.release).atexit = False

    def put(self, slot: Slot, ctx: Any, grad: Tensor, now: bool) -> None:
        """Takes a part.

        Args:
            slot: of the weights.
            ctx: of the call.
            grad: of its output.
            now: whether to compute its gradient at once, unless what waits is free.
        """
        after = None
        if self._lane.side is not None:
            if self._lane.apart:
                self._lane.join((grad, *ctx.saved_for_weight))
            after = self._lane.mark()
        part = Part(ctx, grad, after)
        pile = self._piles.get(slot)
        if pile is None:
            room = None if self._lane.side is None else self._lane.room
            pile = self._piles[slot] = Pile(slot, self._free(slot), room)
            self._size += pile.size
        pile.parts.append(part)
        if slot.function.whole:
            return
        pile.size += part.size
        self._size += part.size
        if now and pile.size > 0:
            self._compute_early(slot, pile)
        while self._size > self._limit:
            self._compute_early(*max(self._piles.items(), key=_weight))

    def flush(self, slot: Slot) -> Sequence[Total | None]:
        """The sums of a slot's gradients, of all that was stashed for them. Called on the side stream."""
        pile = self._piles.pop(slot, None)
        if pile is None:
            return ()
        if pile.parts:
            self._compute(slot, pile)
        return pile.totals

    def drain(self) -> None:
        """Computes all that is held back and takes memory, but for what only the whole batch gives."""
        for slot, pile in self._piles.items():
            if pile.size > 0:
                self._compute_early(slot, pile)
        self._held.release()

    def close(self) -> None:
        """The graph task is over."""
        self._held.release()

    def _free(self, slot: Slot) -> int:
        return slot.size if self._grants and not slot.function.whole else 0

    def _compute_early(self, slot: Slot, pile: Pile) -> None:
        with self._lane.use():
            self._compute(slot, pile)

    def _compute(self, slot: Slot, pile: Pile) -> None:
        self._size -= pile.size
        parts = pile.take()
        stream.wait_for(self._lane.side, parts[-1].after)  # The compute stream is through with the earlier ones, too.
        for part in parts:
            stream.spent(part.after)
        try:
            for part in parts:
                part.verify()
            with without_autocast():
                slot.function.accumulate(pile.totals, [(part.ctx, part.grad) for part in parts])
        except BaseException as error:
            stream.wait(self._lane.compute, self._lane.side)  # What the sums have is compute's, and is free now.
            add_note(error, f"in the weight gradient of {slot}")
            raise
        finally:
            if self._lane.side is not None:
                self._hold([x for part in parts for x in part.tensors()])

    def _hold(self, tensors: list[Tensor]) -> None:
        if torch.is_grad_enabled():  # The gradient's own nodes save them, for a second backward on the side stream.
            for x in tensors:
                stream.hold(x, self._lane.side)
        self._held.hold(tensors)


def _weight(entry: tuple[Slot, Pile]) -> int:
    return entry[1].size


class Flush(Node):
    """A phony; in backward, the gradients of a slot's weights."""

    @staticmethod
    def forward(ctx: Any, stashes: Stashes, slot: Slot, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.stashes, ctx.slot = stashes, slot
        return torch.empty(0, device=stashes.lane.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        stash = ctx.stashes.find()
        # Nothing was stashed if all output gradients were undefined.
        totals = [] if stash is None else stash.flush(ctx.slot)
        return None, None, *([total.value for total in totals if total] or [None] * (len(ctx.needs_input_grad) - 2))


def flush(stashes: Stashes, slot: Slot, weights: Sequence[Tensor]) -> Tensor:
    """The phony whose backward flushes the slot.

    Args:
        stashes: of the stage.
        slot: to flush.
        weights: those with a gradient.
    """
    lane = stashes.lane
    if lane.side is not None:
        # AccumulateGrad belongs to the stream that first asks for it, and expects its gradients from there.
        with stream.use(lane.compute):
            weights = [weight.view_as(weight) for weight in weights]
            for weight in weights:
                rank(weight, LAST)
    with lane.use():
        phony: Tensor = Flush.apply(stashes, slot, *weights)
    if lane.side is not None or stashes.limit is not None:
        rank(phony, LAST)
    return phony


def wanted(phony_node: Any) -> bool:
    """Whether the running graph task will flush: asked for other gradients alone, it won't."""
    execute: bool = _will_engine_execute_node(phony_node)
    return execute
