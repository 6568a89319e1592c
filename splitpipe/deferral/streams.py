"""The stream that weight gradients are computed on, beside the one that a stage computes on.

    compute   B ─┬─ B ─┬─ B ─────────┬─ ...      a weight gradient starts when the B that gave it its input is done,
                 │ event     event   │ wait
    side         └─ W ──────── W ────┘           and compute waits for it before what it reads may be overwritten

Lifetimes: what W reads was allocated for the compute stream, whose allocator hands a freed block out again at once.
So the lane holds it until the compute stream waits for that W. Let go any earlier, a later B would write there while
W still reads. ``record_stream`` would be safe too, and would leave it to luck when the memory is free again.

On the CPU there are no streams, and every verb does nothing: what is computed is computed when the call returns.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.stream import Stream


@dataclass(frozen=True)
class Lane:
    """The two streams of a stage's backward.

    Args:
        device: of the stage.
        compute: the stream that its nodes run on.
        side: the stream of the weight gradients; None on the CPU, and with a schedule, whose W stands between the B's.
    """

    device: torch.device
    compute: Stream
    side: Stream

    def mark(self) -> torch.Event | None:
        """All that the compute stream was given so far."""
        return stream.mark(self.compute)

    @property
    def apart(self) -> bool:
        """True if the node that runs is of a layer that computes on a stream of its own."""
        return not stream.is_current(self.compute)

    def join(self, tensors: Iterable[Tensor | None]) -> None:
        """Makes compute wait for that stream. Autograd does so for gradients of other layers, not for W.

        Args:
            tensors: that W will read.
        """
        stream.wait(self.compute, stream.current(self.device))
        for x in tensors:
            if x is not None:
                stream.hold(x, self.side or self.compute)

    def room(self, make: Callable[[], Tensor]) -> Tensor:
        """The tensor that ``make`` makes, in memory of the compute stream, for the side stream to write to.

        A gradient outlives backward. In the side stream's memory, no activation could ever have its place again.
        """
        with stream.use(self.compute):
            made = make()
        stream.wait(self.side, self.compute)  # What had the memory before may still be read.
        return made


@dataclass
class Held:
    """The tensors that weight gradients read, held as long as the side stream may be reading them.

    Args:
        lane: the streams.
    """

    lane: Lane
    _reading: deque[tuple[torch.Event, list[Tensor]]] = field(default_factory=deque)

    def hold(self, tensors: list[Tensor]) -> None:
        """Holds what the side stream was just given to read; lets go of what it was given before."""
        done = stream.mark(self.lane.side)
        if done is not None:
            self.release()
            self._reading.append((done, tensors))

    def release(self) -> None:
        """Makes the compute stream wait for the side stream, and lets go."""
        while self._reading:
            done, _ = self._reading[0]
            stream.wait_for(self.lane.compute, done)
            self._reading.popleft()
            stream.spent(done)
