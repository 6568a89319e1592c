"""Times of passes as they run: the host's clock for what runs on the CPU, events for streams.

A reel belongs to one stage in one pass, and is written to by its worker alone. Marking an event waits for nothing;
what the events say is read when the recording ends.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.stream import Stream, moment
from splitpipe.core.thread_state import Hooks
from splitpipe.training.steps import Step

#: Seconds of the host's clock, or an event.
Mark = Any
Part = tuple[Mark, Mark]


def mark(stream: Stream) -> Mark:
    """This moment, on a stream."""
    if stream is None:
        return perf_counter()
    return moment(stream)


@dataclass
class Reel:
    """What one stage does in one pass.

    Args:
        stream: that the stage computes on.
        weigh: which microbatch's saved tensors are counted; None: no one's.
        known: storages that live on anyway.

    Attributes:
        passes: each step with the times in which it computed; a recomputation comes apart from the rest.
        copies: of values to other stages.
        saved: bytes that the microbatch saved; None: not counted.
        kept: bytes of these that W needed.
    """

    stream: Stream
    weigh: int | None
    known: Collection[int]
    passes: list[tuple[Step, list[Part]]] = field(default_factory=list)
    copies: list[Part] = field(default_factory=list)
    saved: int | None = None
    kept: int = 0
    _parts: list[Part] = field(default_factory=list)
    _start: Mark = None
    _copying: Mark = None

    def start(self) -> None:
        """From now on the stage computes."""
        self._start = mark(self.stream)

    def stop(self) -> None:
        """Until now it did."""
        self._parts.append((self._start, mark(self.stream)))

    def copied(self, stream: Stream, done: bool) -> None:
        """A copy starts, or has ended, on a stream."""
        if done:
            self.copies.append((self._copying, mark(stream)))
        else:
            self._copying = mark(stream)

    def note(self, step: Step) -> None:
        """The step is done."""
        self.passes.append((step, self._parts))
        self._parts = []

    def counting(self) -> Hooks:
        """Saved-tensor hooks that count the bytes of what is saved, each memory once."""
        seen = set(self.known)
        self.saved = 0

        def pack(x: Tensor) -> Tensor:
            assert self.saved is not None
            identity = memory(x)
            if identity not in seen:
                seen.add(identity)
                self.saved += x.untyped_storage().nbytes() if identity else x.nbytes
            return x.detach()  # The node's own output, held by the node, would be a cycle.

        return pack, _itself


def memory(x: Tensor) -> int:
    """What tells a tensor's memory from others'; 0 for those that have none of their own to tell."""
    if x.layout is not torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
        return 0
    identity: int = x.untyped_storage()._cdata
    return identity


def _itself(x: Tensor) -> Tensor:
    return x

