"""What really happened: the steps of a model while it is recorded, made to a timeline."""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.stream import Place, Stream, moment
from splitpipe.core.thread_state import Hooks
from splitpipe.schedule.costs import Bytes
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.schedule.recording.step import Step
from splitpipe.schedule.timed import Span
from splitpipe.training.rows import OpRun


class Recorder:
    """Takes the reels of every pass, and develops them when the recording ends.

    Args:
        schedule: of the model.
        places: of its stages.
    """

    def __init__(self, schedule: Schedule, places: Sequence[Place]) -> None:
        self._placement = schedule.placement
        self._places = places
        homes = [places[schedule.placement.index(device)] for device in range(schedule.devices)]
        self._devices = [home.device for home in homes]
        self.recording = Recording(schedule, [str(home) for home in homes])
        self._passes: list[tuple[list[Reel], tuple[int | None, ...]]] = []
        self._weighed = False
        # Clocks of devices have zeros of their own. All that they were given before is waited for once, here.
        self._zero: dict[torch.device, tuple[Mark, float]] = {}
        for device in {device for device in self._devices if device.type != "cpu"}:
            stream.synchronize(device)
            self._zero[device] = mark(stream.current(device)), perf_counter()

    def begin(self, computes: Sequence[stream.Stream], known: Callable[[], set[int]]) -> list[Reel]:
        """The reels of a pass.

        Args:
            computes: the stream of each stage.
            known: gives the storages that live on anyway.
        """
        for device in set(self._devices):
            if device.type != "cpu":
                torch.get_device_module(device).reset_peak_memory_stats(device)
        weigh, self._weighed = None if self._weighed else 0, True
        living = known() if weigh == 0 else set()
        return [Reel(compute, weigh, living) for compute in computes]

    def end(self, reels: list[Reel]) -> None:
        """The pass was completed."""
        self._passes.append((reels, tuple(_most(device) for device in self._devices)))

    def develop(self) -> None:
        """Makes steps of the reels."""
        for device in self._zero:
            stream.synchronize(device)
        for reels, most in self._passes:
            self.recording.add(self._step(reels, most))
        weighed = [reel for reels, _ in self._passes for reel in reels if reel.weigh is not None]
        saved = [reel.saved for reel in weighed if reel.saved is not None]
        if saved and len(saved) == len(weighed):
            self.recording.kept = tuple(reel.kept for reel in weighed)
            kept = [min(reel.kept, all_) for reel, all_ in zip(weighed, saved)]
            self.recording.held = Bytes(saved, [all_ - late for all_, late in zip(saved, kept)], kept)
        self._passes = []

    def _step(self, reels: list[Reel], most: tuple[int | None, ...]) -> Step:
        rows: list[list[Span]] = [[] for _ in self._devices]
        for stage, reel in enumerate(reels):
            for step, parts in reel.passes:
                spans = [self._times(stage, part) for part in parts]
                if not spans:
                    continue
                end = spans[-1][1]
                # A recomputation that came before the gradient counts as if it had come just before it was used.
                start = end - sum(after - before for before, after in spans)
                each = (end - start) / len(step.microbatches)
                rows[self._placement[stage]] += [
                    Span(Op(step.kind, stage, microbatch), start + k * each, start + (k + 1) * each)
                    for k, microbatch in enumerate(step.microbatches)
                ]
        zero = min(span.start for row in rows for span in row)
        copies = [
            (stage, end - start) for stage, reel in enumerate(reels)
            for start, end in (self._times(stage, part) for part in reel.copies)
        ]
        return Step(
            spans=tuple(
                tuple(Span(op, start - zero, end - zero) for op, start, end in sorted(row, key=lambda span: span[1:]))
                for row in rows
            ),
            copies=tuple(copies),
            memory=most,
        )

    def _times(self, stage: int, part: Part) -> tuple[float, float]:
        """Milliseconds of the host's clock."""
        return self._time(stage, part[0]), self._time(stage, part[1])

    def _time(self, stage: int, at: Any) -> float:
        if isinstance(at, float):
            return at * 1e3
        event, host = self._zero[self._places[stage].device]
        return host * 1e3 + float(event.elapsed_time(at))


def _most(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None  # Its allocator does not count.
    most: int = torch.get_device_module(device).max_memory_allocated(device)
    return most


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
    passes: list[tuple[OpRun, list[Part]]] = field(default_factory=list)
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

    def note(self, step: OpRun) -> None:
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
