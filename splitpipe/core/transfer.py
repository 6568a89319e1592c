"""Copy, Wait and Leave: move a tensor to the next stage's stream, and its gradient back, on streams for copies.

    compute ── Leave ──> copy  ══ Copy ══>  copy ── Wait ──> compute     (backward: the same, mirrored)
    `────── source Port ──────´            `────── target Port ────´

Streams are passed as arguments: inside a backward thread, "the current stream" of the other device is the one that the
thread used last, not the one on which the forward ran.

In backward, nothing waits for the tail of a copy stream, where copies for later microbatches may already be queued.
Copy is a node of the target's copy stream, and the engine makes what follows wait only for the event of that copy:
first the nodes on the source's order stream, which is used for nothing else, and then Leave, a node of the compute
stream.

Lifetimes: the allocator reuses a block as soon as its own stream has passed the free. A tensor that is read on another
stream is held there; without the ``hold``, the block would be written to while the copy still reads it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe.core import stream
from splitpipe.core.graph import FIRST, Cross, Edge, rank, rank_of
from splitpipe.core.stream import Stream
from splitpipe.core.tensors import is_plain


@dataclass(frozen=True)
class Port:
    """One side of a transfer: the device, and the streams on which its stage computes and copies."""

    device: torch.device
    compute: Stream
    copy: Stream
    order: Stream = None  # For the node between a gradient's copy and the stage: Recompute.


class Copy(Function):
    """The tensor on the target's device, copied on the copy streams of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Port, target: Port, made: Tensor | None = None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.ports = source, target
        y = move(x, source, target) if made is None else made
        return y.detach() if y is x or y is made else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        source, target = ctx.ports
        return None if grad is None else Copy.apply(grad, target, source), None, None, None


class Wait(Function):
    """The tensor, after ``second`` waits for ``first`` or for its event; in backward, the other way round."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Stream, second: Stream, event: torch.Event | None = None, waited: bool = False
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.streams = first, second
        if event is not None:
            stream.wait_for(second, event)
        elif not waited:
            stream.wait(second, first)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        first, second = ctx.streams
        return None if grad is None else Wait.apply(grad, second, first), None, None, None, None


class Leave(Function):
    """The tensor, after copy waits for compute; in backward, the engine makes compute wait for the gradient's copy."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Port, to_cpu: bool, after: torch.Event | None = None, waited: bool = False
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.to_cpu = source, to_cpu
        if not waited:
            _await(source, after)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        return None if grad is None else Return.apply(grad, ctx.source, ctx.to_cpu), None, None, None, None


class Return(Function):
    """A gradient back on the compute stream. In double backward, it leaves again, and the copy stream waits again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, source: Port, to_cpu: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.to_cpu = source, to_cpu
        if to_cpu:  # The engine knows no stream for a gradient from the CPU.
            stream.wait(source.compute, source.copy)
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if grad is None else Leave.apply(grad, ctx.source, ctx.to_cpu), None, None


def brought(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, copied by the current streams."""
    # A copy from or to the CPU is waited for. Code on the CPU doesn't know about streams: it would read memory that is
    # yet to be written, or refill a pinned buffer that is yet to be read.
    if "cpu" in (x.device.type, device.type):
        return x.to(device)
    if x.device != device and is_plain(x) and not x.is_contiguous() and _has_gaps(x):
        # Between GPUs without peer access, torch would copy it in two steps. The second one runs on the target's
        # stream, and in backward nothing would wait for that.
        x = x.clone()
    return x.to(device, non_blocking=True)


def _has_gaps(x: Tensor) -> bool:
    """True unless the elements fill one piece of memory, each of them once, in any order."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size != 1:
            if stride != reach:
                return True
            reach *= size
    return False


def move(x: Tensor, source: Port, target: Port) -> Tensor:
    """The tensor on the target's device, outside autograd."""
    with stream.use(target.copy, source.copy):
        y = brought(x, target.device)
    if y is x:
        stream.wait(target.copy, source.copy)  # Two streams of one device: there was no copy to order them.
    stream.hold(x, source.copy)
    stream.hold(y, target.compute)
    return y


def _await(source: Port, after: torch.Event | None) -> None:
    if after is None:
        stream.wait(source.copy, source.compute)
    else:
        stream.wait_for(source.copy, after)


def leave(x: Tensor, source: Port, target: Port, after: torch.Event | None = None) -> Tensor:
    """The tensor for the copy stream, which waits for all work of compute, or for the event ``after``."""
    if not _tracked(x):
        _await(source, after)
        return x
    with stream.use(source.compute):
        y: Tensor = Leave.apply(x, source, target.device.type == "cpu", after)
    rank(y, rank_of(x))  # It belongs to the stage, and runs backward with the stage's own nodes.
    return y


def depart(x: Tensor, source: Port, target: Port) -> Tensor:
    """The tensor that left the source, copied to the target's device; the target's stage must wait for the copy."""
    with stream.use(target.copy, source.copy):
        if not _tracked(x):
            return move(x, source, target)
        y: Tensor = Copy.apply(x, source, target)
        rank(y, FIRST)
        return y


def arrive(x: Tensor, target: Port, event: torch.Event | None) -> Tensor:
    """The tensor that departed, for use by the target's stage: after the event."""
    if not _tracked(x):
        stream.wait_for(target.compute, event)
        return x
    with stream.use(target.copy):
        y: Tensor = Wait.apply(x, target.copy, target.compute, event)
    rank(y, FIRST)
    return y


class Crossing(NamedTuple):
    """How a value reached a stage, from its nodes: from which edge, and between which ports if it was copied."""

    edge: Edge
    source: Port | None = None
    target: Port | None = None

    @classmethod
    def of(cls, node: Any) -> Crossing:
        """The crossing that ends with a node: a Cross, or the Wait after a Copy."""
        (edge,) = node.next_functions
        if isinstance(node, _CROSS):
            return cls(edge)
        copy = edge[0]
        ((left, _),) = copy.next_functions
        (edge,) = left.next_functions
        return cls(edge, *copy.ports)

    def again(self, x: Tensor, y: Tensor) -> Tensor:
        """Makes the same nodes for another tensor of the source's stage; ``y`` represents its copy: nothing moves."""
        source, target = self.source, self.target
        if source is None or target is None:
            return x
        with stream.use(source.compute):
            left = Leave.apply(x, source, target.device.type == "cpu", None, True)
        rank(left, rank_of(x))
        with stream.use(target.copy, source.copy):
            copied = Copy.apply(left, source, target, y)
        with stream.use(target.copy):
            waited: Tensor = Wait.apply(copied, target.copy, target.compute, None, True)
        for each in (copied, waited):
            rank(each, FIRST)
        return waited


_CROSS: Any = Cross._backward_cls


def hand_over(x: Tensor, giver: Stream, taker: Stream) -> Tensor:
    """The tensor for another stream of its device."""
    stream.hold(x, taker)
    if stream.same(giver, taker):
        return x
    if _tracked(x):
        waited: Tensor = Wait.apply(x, giver, taker)
        return waited
    stream.wait(taker, giver)
    return x


def _tracked(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


@dataclass(frozen=True)
class Route:
    """The path from one stage to another."""

    source: Port
    target: Port

    def depart(self, leaves: Sequence[Any]) -> tuple[list[Any], torch.Event | None]:
        """Values that left the source's stage, as nodes on the target's device, and the event of their arrival."""
        copied = [depart(leaf, self.source, self.target) if self._carries(leaf) else leaf for leaf in leaves]
        return copied, stream.mark(self.target.copy)

    def arrive(self, leaves: Sequence[Any], event: torch.Event | None) -> list[Any]:
        """Values that departed, for use by the target's stage. Called once, when that stage runs."""
        device = self.target.device
        arrived = [
            arrive(leaf, self.target, event) if isinstance(leaf, Tensor) and leaf.device == device else leaf
            for leaf in leaves
        ]
        stream.spent(event)
        return arrived

    def carry(
        self,
        leaves: Sequence[Any],
        timed: Callable[[Stream, bool], None] | None = None,
        after: torch.Event | None = None,
    ) -> tuple[list[Any], torch.Event | None]:
        """Copies values of the source's compute stream, outside autograd; also returns the event after which they are
        there.

        ``timed`` is called with the stream that copies, before the copy (False) and after it (True). With an event
        ``after``, the copy only waits for that.
        """
        _await(self.source, after)
        if timed is not None:
            timed(self.source.copy, False)
        moved = [move(leaf, self.source, self.target) if self._carries(leaf) else leaf for leaf in leaves]
        if timed is not None:
            timed(self.source.copy, True)
        return moved, stream.mark(self.target.copy)

    def _carries(self, leaf: Any) -> bool:
        # A tensor that a layer has moved elsewhere (such as lengths on the CPU) stays there.
        return isinstance(leaf, Tensor) and leaf.device == self.source.device


@dataclass
class Routes:
    """The routes between stages that compute on some streams, each created when it is first used."""

    devices: Sequence[torch.device]
    computes: Sequence[Stream]
    named: Callable[[torch.device, str], Stream]
    _found: dict[tuple[int, int], Route | None] = field(default_factory=dict)

    def of(self, source: int, target: int) -> Route | None:
        """The route from a stage to another; None if both compute on one stream, so that nothing is copied."""
        if (source, target) not in self._found:
            self._found[source, target] = self._made(source, target)
        return self._found[source, target]

    def _made(self, source: int, target: int) -> Route | None:
        here, there = self.devices[source], self.devices[target]
        if here == there and stream.same(self.computes[source], self.computes[target]):
            return None
        # One stream per link: on a common one, a copy would wait for copies from stages that aren't ready.
        into = Port(there, self.computes[target], self.named(there, f"in from {source}"))
        return Route(Port(here, self.computes[source], self.named(here, "out"), self.named(here, "order")), into)
