"""Copies of values from one stage's device to another's, on streams for copies, outside autograd.

    compute of the source ──> out  ══ copy ══>  into ──> compute of the target

Lifetimes: the allocator reuses a block as soon as its own stream has passed the free. A tensor that is read on another
stream is held there; without the ``hold``, the block would be written to while the copy still reads it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.stream import Stream
from splitpipe.core.tensors import is_plain


def brought(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, copied by the current streams."""
    # A copy from or to the CPU is waited for. Code on the CPU doesn't know about streams: it would read memory that is
    # yet to be written, or refill a pinned buffer that is yet to be read.
    if "cpu" in (x.device.type, device.type):
        return x.to(device)
    spread = x.device != device and is_plain(x) and not x.is_contiguous()
    if spread and not torch.ops.aten.is_non_overlapping_and_dense(x):
        # It has gaps. Between GPUs without peer access, torch would copy it in two steps. The second one runs on the
        # target's stream, and in backward nothing would wait for that.
        x = x.clone()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True)
class Route:
    """The path from one stage to another: devices, the streams that compute there, and those of the copy."""

    source: torch.device
    target: torch.device
    computes: tuple[Stream, Stream]
    out: Stream
    into: Stream

    def carry(
        self, leaves: Sequence[Any], timed: Callable[[Stream], None] | None = None,
        after: torch.Event | None = None,
    ) -> tuple[list[Any], torch.Event | None]:
        """Copies values of the source's compute stream; also returns the event after which they are there.

        ``timed`` is called with the stream that copies, before and after it. ``after``: the copy only waits for that.
        """
        if after is None:
            stream.wait(self.out, self.computes[0])
        else:
            stream.wait_for(self.out, after)
        if timed is not None:
            timed(self.out)
        # What a layer has moved elsewhere, such as lengths on the CPU, stays there. One that occurs twice is one.
        known = {id(x): x for x in leaves if isinstance(x, Tensor) and x.device == self.source}
        moved = {key: self._move(x) for key, x in known.items()}
        if timed is not None:
            timed(self.out)
        return [moved.get(id(x), x) for x in leaves], stream.mark(self.into)

    def _move(self, x: Tensor) -> Tensor:
        with stream.use(self.into, self.out):
            y = brought(x, self.target)
        if y is x:
            stream.wait(self.into, self.out)  # Two streams of one device: there was no copy to order them.
        stream.hold(x, self.out)
        stream.hold(y, self.computes[1])
        return y
