"""The side stream, on which weight gradients are computed; the stage computes on another, the compute stream.

    compute   B ─┬─ B ─┬─ B ─────────┬─ ...      a weight gradient starts after the B that produced its input,
                │ event     event   │ wait
   side         └─ W ──────── W ────┘           and compute waits for it before its inputs may be overwritten

Lifetimes: W's inputs were allocated for the compute stream, whose allocator reuses a freed block at once. So they are
kept until the compute stream waits for that W. If they were released earlier, a later B would write there while W still
reads. ``record_stream`` would be safe too, but with it the memory would be freed at an unpredictable time.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.stream import Stream
from splitpipe.deferral.accumulator import Total


@dataclass(frozen=True)
class BackwardStreams:
    """The two streams of a stage's backward; ``side`` is None on the CPU, and with a schedule, in which W waits its
    turn.

    On the CPU, there are no streams, and every method does only what its first line says.
    """

    device: torch.device
    compute: Stream
    side: Stream

    def allocate(self, totals: Sequence[Total]) -> None:
        """Gives empty sums memory of the compute stream, for the side stream to write to.

        A gradient outlives backward. In the side stream's memory, activations could never use its place again.
        """
        lacking = [total for total in totals if total.lacks_memory]
        if self.side is None or not lacking:
            return
        with stream.use(self.compute):
            for total in lacking:
                total.allocate(self.device)
        stream.wait(self.side, self.compute)  # The memory's last owner may still be being read.


@dataclass
class Reads:
    """The tensors that weight gradients read, kept as long as the side stream may be reading them."""

    streams: BackwardStreams
    _reading: deque[tuple[torch.Event, list[Tensor]]] = field(default_factory=deque)

    def add(self, tensors: list[Tensor]) -> None:
        """Keeps what the side stream was just given to read; releases what it was given before."""
        done = stream.mark(self.streams.side)
        if done is not None:
            self.release()
            self._reading.append((done, tensors))

    def release(self) -> None:
        """Makes the compute stream wait for the side stream, and releases the tensors."""
        while self._reading:
            done, _ = self._reading[0]
            stream.wait_for(self.streams.compute, done)
            self._reading.popleft()
            stream.spent(done)
