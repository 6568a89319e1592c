"""Records the steps of a model as a timeline."""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.stream import Place, Stream, moment
from splitpipe.core.tensors import Address, memory_of
from splitpipe.core.thread_state import Hooks, unchanged
from splitpipe.schedule.costs import Bytes
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.schedule.recording.step import Step
from splitpipe.schedule.timed import Span

#: Seconds on the host's clock, or an event.
Mark = Any
Part = tuple[Mark, Mark]


class Recorder:
    """Collects the traces of every call, and turns them into steps when the recording ends."""

    def __init__(self, schedule: Schedule, places: Sequence[Place]) -> None:
        self._placement = schedule.placement
        self._places = places
        own = dict(zip(schedule.placement, places))  # A device may have no stage.
        homes = [own.get(device, places[0]) for device in range(schedule.devices)]
        self._devices = [home.device for home in homes]
        self.recording = Recording(schedule, [str(home) for home in homes])
        self._calls: list[tuple[list[StageTrace], tuple[int | None, ...]]] = []
        self._measured = False
        # Each device's clock has a different zero. Earlier work of the devices is waited for once, here.
        self._zero: dict[torch.device, tuple[Mark, float]] = {}
        for device in {device for device in self._devices if device.type != "cpu"}:
            stream.synchronize(device)
            self._zero[device] = mark(stream.current(device)), perf_counter()

    def begin(self, computes: Sequence[Stream], excluded: Callable[[], set[Address]]) -> list[StageTrace]:
        """The traces of a call, one per stage; ``excluded`` returns the storages that live on anyway."""
        for device in set(self._devices):
            if device.type != "cpu":
                torch.get_device_module(device).reset_peak_memory_stats(device)
        measured, self._measured = None if self._measured else 0, True
        living = excluded() if measured == 0 else set()
        return [StageTrace(compute, measured, living) for compute in computes]

    def end(self, traces: list[StageTrace]) -> None:
        """Ends a call that completed."""
        self._calls.append((traces, tuple(_peak(device) for device in self._devices)))

    def finish(self) -> None:
        """Turns every call's traces into a step."""
        for device in self._zero:
            stream.synchronize(device)
        for traces, peaks in self._calls:
            self.recording.add(self._step(traces, peaks))
        measured = [trace for traces, _ in self._calls for trace in traces if trace.measured_microbatch is not None]
        saved = [trace.saved for trace in measured if trace.saved is not None]
        if saved and len(saved) == len(measured):
            self.recording.kept = tuple(trace.kept for trace in measured)
            self.recording.saved = tuple(trace.storages for trace in measured)
            kept = [min(trace.kept, all_) for trace, all_ in zip(measured, saved)]
            self.recording.held = Bytes(saved, [all_ - late for all_, late in zip(saved, kept)], kept)
        self._calls = []

    def _step(self, traces: list[StageTrace], peaks: tuple[int | None, ...]) -> Step:
        rows: list[list[Span]] = [[] for _ in self._devices]
        for stage, trace in enumerate(traces):
            for kind, microbatches, parts in trace.ops:
                spans = [self._times(stage, part) for part in parts]
                if not spans:
                    continue
                end = spans[-1][1]
                # A recomputation before the gradient arrived counts as if it had come just before the gradient was
                # used.
                start = end - sum(after - before for before, after in spans)
                each = (end - start) / len(microbatches)
                rows[self._placement[stage]] += [
                    Span(Op(kind, stage, microbatch), start + k * each, start + (k + 1) * each)
                    for k, microbatch in enumerate(microbatches)
                ]
        zero = min(span.start for row in rows for span in row)
        copies = []
        for stage, trace in enumerate(traces):
            for part in trace.copies:
                start, end = self._times(stage, part)
                copies.append((stage, end - start))
        for row in rows:
            row.sort(key=lambda span: span[1:])
        return Step(
            spans=tuple(tuple(Span(op, start - zero, end - zero) for op, start, end in row) for row in rows),
            copies=tuple(copies),
            memory=peaks,
        )

    def _times(self, stage: int, part: Part) -> tuple[float, float]:
        """The times of a part in milliseconds on the host's clock."""
        return self._time(stage, part[0]), self._time(stage, part[1])

    def _time(self, stage: int, at: Mark) -> float:
        if isinstance(at, float):
            return at * 1e3
        event, host = self._zero[self._places[stage].device]
        return host * 1e3 + float(event.elapsed_time(at))


def _peak(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None  # Its allocator has no statistics.
    peak: int = torch.get_device_module(device).max_memory_allocated(device)
    return peak


def mark(on: Stream) -> Mark:
    """The current time on a stream."""
    return perf_counter() if on is None else moment(on)


@dataclass
class StageTrace:
    """The ops of one stage in one call, with the times in which it computed; recomputations are recorded separately.

    For the measured microbatch, if any, it counts the bytes that it saved and those that W needed, without the storages
    that are ``excluded`` because they live on.
    """

    stream: Stream
    measured_microbatch: int | None
    excluded: Collection[Address]
    ops: list[tuple[Kind, tuple[int, ...], list[Part]]] = field(default_factory=list)
    copies: list[Part] = field(default_factory=list)
    saved: int | None = None
    kept: int = 0
    storages: dict[Any, int] = field(default_factory=dict)
    _saved: list[ref[Tensor]] | None = None
    _parts: list[Part] = field(default_factory=list)
    _start: Mark = None
    _copying: Mark = None

    def start(self) -> None:
        """Records that the stage computes from now on."""
        self._start = mark(self.stream)

    def stop(self) -> None:
        """Records that the stage has computed until now."""
        self._parts.append((self._start, mark(self.stream)))

    def copied(self, on: Stream, done: bool) -> None:
        """Records that a copy to another stage starts, or has ended, on a stream."""
        if done:
            self.copies.append((self._copying, mark(on)))
        else:
            self._copying = mark(on)

    def note(self, kind: Kind, microbatches: tuple[int, ...]) -> None:
        """Records that an op is done, or several W of the stage together."""
        if self._saved is not None and kind == "F" and self.measured_microbatch in microbatches:
            self.storages = memory_of(*(x for saved in self._saved if (x := saved()) is not None))
            self.saved = sum(size for address, size in self.storages.items() if address not in self.excluded)
            self._saved = None
        self.ops.append((kind, microbatches, self._parts))
        self._parts = []

    def counting(self) -> Hooks:
        """Saved-tensor hooks that find what autograd saves, and still holds when F ends."""
        found = self._saved = []

        def pack(x: Tensor) -> Tensor:
            made = x.detach()  # A node that kept its own output would be a cycle.
            found.append(ref(made))
            return made

        return pack, unchanged
