"""Copy and Wait: a tensor moved to the next stage's stream, and its gradient moved back, on streams of their own.

    compute ── Wait ──> copy  ══ Copy ══>  copy ── Wait ──> compute      (backward: the same, mirrored)
    `────── source Port ───´              `────── target Port ─────´

Streams are named, never asked for: inside a backward thread "the current stream" of the other device is whatever
that thread last had, not what the forward ran on.

Lifetimes: the allocator reuses a block as soon as its own stream has passed the free. A tensor read on another
stream is held there; leave the ``hold`` out and the block is written to while the copy still reads it.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe import stream
from splitpipe.stream import Stream


@dataclass(frozen=True)
class Port:
    """One side of a transfer: the device, the stream its stage computes on, and the one it copies on."""

    device: torch.device
    compute: Stream
    copy: Stream


class Copy(Function):
    """The tensor on the target's device, copied on the copy streams of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Port, target: Port) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.ports = source, target
        y = move(x, source, target)
        return y.detach() if y is x else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        source, target = ctx.ports
        return None if grad is None else Copy.apply(grad, target, source), None, None


class Wait(Function):
    """The tensor, once ``second`` waits for ``first``; in backward ``first`` waits for ``second``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Stream, second: Stream) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.streams = first, second
        stream.wait(second, first)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        first, second = ctx.streams
        return None if grad is None else Wait.apply(grad, second, first), None, None


def move(x: Tensor, source: Port, target: Port) -> Tensor:
    """The tensor on the target's device, outside of autograd."""
    with stream.use(target.copy, source.copy):
        # To the CPU the copy is waited for: what runs there does not know of streams.
        y = x.to(target.device, non_blocking=target.device.type != "cpu")
    if y is x:
        stream.wait(target.copy, source.copy)  # Two streams of one device: nothing was copied that would order them.
    stream.hold(x, source.copy)
    stream.hold(y, target.compute)
    return y


def leave(x: Tensor, source: Port) -> Tensor:
    """The tensor on its way out: the copy stream has it after all that the compute stream was given."""
    with stream.use(source.copy):
        return _waited(x, source.compute, source.copy)


def arrive(x: Tensor, source: Port, target: Port) -> Tensor:
    """The tensor that left the source, as the target's stage may use it."""
    with stream.use(target.copy, source.copy):
        if x.requires_grad and torch.is_grad_enabled():
            x = Copy.apply(x, source, target)
        else:
            x = move(x, source, target)
        return _waited(x, target.copy, target.compute)


def hand_over(x: Tensor, giver: Stream, taker: Stream) -> Tensor:
    """The tensor for another stream of its own device."""
    stream.hold(x, taker)
    return _waited(x, giver, taker)


def _waited(x: Tensor, first: Stream, second: Stream) -> Tensor:
    if first == second:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        waited: Tensor = Wait.apply(x, first, second)
        return waited
    stream.wait(second, first)
    return x
