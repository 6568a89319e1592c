"""Copy and Wait: a tensor on the next stage's device, the order of streams around the copy, and that of microbatches.

    compute ── Wait ──> copy  ══ Copy ══>  copy ── Wait ──> compute     (backward: the same, mirrored)
    `──────── source ─────────´            `──────── target ────────´

Each microbatch has a copy stream on each device: on a common one, a stage that waits for a copy would also wait for
those of later microbatches, which are queued behind it. Streams are passed as arguments, since the current stream of
another device is, in a thread of autograd's engine, the one that the thread used last.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe.core import stream
from splitpipe.core.stream import NamedStreams, Stream
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.core.transfer import brought
from splitpipe.engine.step import StepRun


@dataclass(frozen=True)
class Port:
    """A stage's side of a copy, for one microbatch: its device, and the streams on which it computes and copies."""

    device: torch.device
    compute: Stream
    copy: Stream


class Copy(Function):
    """The tensor on the target's device, copied on the copy streams of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Port, target: Port) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.ports = source, target
        with stream.use(target.copy, source.copy):
            y = brought(x, target.device)
        stream.hold(x, source.copy)  # The allocator reuses memory as soon as its own stream has passed the free.
        stream.hold(y, target.compute)
        return y.detach() if y is x else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        source, target = ctx.ports
        return None if grad is None else Copy.apply(grad, target, source), None, None


class Wait(Function):
    """The tensor, for ``second``, which waits for ``first``; in backward, the other way round.

    ``checkpoint``: of what ends here; before it waits, backward recomputes that. It lives as long as nodes need it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Stream, second: Stream, checkpoint: Any = None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.streams, ctx.checkpoint = (first, second), None if checkpoint is None else ref(checkpoint)
        stream.wait(second, first)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        # Here, on its device: that device's thread alone may set the generator.
        if ctx.checkpoint is not None and (checkpoint := ctx.checkpoint()) is not None:
            checkpoint.recompute()
        first, second = ctx.streams
        return None if grad is None else Wait.apply(grad, second, first), None, None, None


class Lane:
    """A microbatch's way through the graph: its ports by stage; ``streams``: those for copies.

    In backward, a device runs that of the nodes that are ready which has the highest number. What ends a stage has a
    lower number than all nodes inside stages, and than what ends one of a later microbatch. So a microbatch goes all
    the way before the one before it. An edge between lanes (torchgpipe's Fork and Join) would do so, too, but a value
    that the loss doesn't use would then get a gradient of None, and hooks would be called with it.
    """

    def __init__(self, step: StepRun, i: int, streams: NamedStreams) -> None:
        self._ports = [Port(each.device, each.compute, streams(each.device, f"microbatch {i}")) for each in step.stages]
        self._number, self._grad = i * len(self._ports), step.call.state.grad
        self._reserved = step.call.microbatches * len(self._ports) if self._grad else 0

    def begin(self) -> None:
        """Gives all later nodes of this thread higher numbers than those that end stages."""
        for _ in range(_get_sequence_nr(), self._reserved):  # Once a thread.
            torch.empty(0, device="cpu", requires_grad=True).view(0)

    def leave(self, x: Tensor, stage: int, checkpoint: Any = None) -> Tensor:
        """The tensor, as it ends a stage, for the copy stream, which waits for what the stage computes."""
        port = self._ports[stage]
        if x.device != port.device:  # A layer has moved it.
            return x
        if x.is_leaf and x.requires_grad:  # The node that adds its gradient gets the stream of its first use.
            with stream.use(port.compute):
                x = Wait.apply(x, None, None)
        with stream.use(port.copy):
            y: Tensor = Wait.apply(x, port.compute, port.copy, checkpoint)
        if y.grad_fn is not None:
            y.grad_fn._set_sequence_nr(self._number + stage)  # type: ignore[attr-defined]
        return y

    def bring(self, x: Tensor, source: int, target: int) -> Tensor:
        """The tensor that ended a stage, on another one's device; that stage waits for the copy."""
        here, there = self._ports[source], self._ports[target]
        if x.device != here.device or here.device == there.device and here.compute == there.compute:
            return x
        with stream.use(here.copy, there.copy):
            y: Tensor = Wait.apply(Copy.apply(x, here, there), there.copy, there.compute)
        return y

    def carry(self, x: Tensor, source: int, target: int) -> Tensor:
        """A tensor of one stage, for another."""
        with torch.set_grad_enabled(self._grad):  # Code in no_grad may use it again afterwards.
            return self.bring(self.leave(x, source), source, target)
