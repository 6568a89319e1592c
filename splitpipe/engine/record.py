"""Records the steps of a model as a timeline."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import torch

from splitpipe.core import stream
from splitpipe.core.stream import Place, Stream, moment
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.recording import Recording, Step
from splitpipe.schedule.timed import Span
from splitpipe.stage.segment import RunningStage

#: Seconds on the host's clock, or an event.
Mark = Any


class StageTrace:
    """The ops of one stage in one call, and its copies to others, with their starts and ends.

    ``ended`` is called at the end of every op, with the stage and the kind.
    """

    def __init__(self, stage: RunningStage, ended: Callable[..., None] | None) -> None:
        self._stage, self._ended, self._start = stage, ended, None
        self.ops: list[tuple[Kind | Literal["R"], tuple[int, ...], Mark, Mark]] = []
        self.copies: list[Mark] = []

    def start(self) -> None:
        """Records that the stage computes from now on."""
        self._start = _mark(self._stage.compute)

    def end(self, kind: Kind | Literal["R"], microbatches: tuple[int, ...]) -> None:
        """Records that an op is done, or several W of the stage together."""
        self.ops.append((kind, microbatches, self._start, _mark(self._stage.compute)))
        if self._ended is not None:
            self._ended(self._stage, kind)

    def copied(self, on: Stream) -> None:
        """Records that a copy starts, or has ended, on a stream."""
        self.copies.append(_mark(on))


class Recorder:
    """Collects the traces of every call, which become steps when the recording ends."""

    def __init__(self, schedule: Schedule, places: Sequence[Place], ended: Callable[..., None] | None) -> None:
        self._placement, self._places, self._ended = schedule.placement, places, ended
        own = dict(zip(schedule.placement, places))  # A device may have no stage.
        homes = [own.get(device, places[0]) for device in range(schedule.devices)]
        self._devices = [home.device for home in homes]
        self.recording = Recording(schedule, [str(home) for home in homes])
        self._calls: list[tuple[Sequence[StageTrace], list[int | None]]] = []
        # Each device's clock has a different zero. Earlier work of the devices is waited for once, here.
        self._zero: dict[torch.device, tuple[Mark, float]] = {}
        for device in {device for device in self._devices if device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)
            self._zero[device] = _mark(stream.current(device)), perf_counter()

    def begin(self, stages: Sequence[RunningStage]) -> Sequence[StageTrace]:
        """The traces of a call, one per stage."""
        for device in self._zero:
            torch.get_device_module(device).reset_peak_memory_stats(device)
        return [StageTrace(stage, self._ended) for stage in stages]

    def end(self, traces: Sequence[StageTrace]) -> None:
        """Ends a call that completed."""
        most = {device: torch.get_device_module(device).max_memory_allocated(device) for device in self._zero}
        self._calls.append((traces, [most.get(device) for device in self._devices]))

    def finish(self) -> None:
        """Turns every call's traces into a step."""
        for device in self._zero:
            torch.get_device_module(device).synchronize(device)
        for traces, peaks in self._calls:
            self.recording.add(self._step(traces, peaks))

    def _step(self, traces: Sequence[StageTrace], peaks: Sequence[int | None]) -> Step:
        rows: list[list[Span]] = [[] for _ in self._devices]
        copies: list[tuple[int, float]] = []
        zero = min([self._time(stage, trace.ops[0][2]) for stage, trace in enumerate(traces)])
        for stage, trace in enumerate(traces):
            marks = [self._time(stage, mark) for mark in trace.copies]
            copies += [(stage, end - start) for start, end in zip(marks[::2], marks[1::2])]
            recomputed = 0.0  # It counts to the B that follows, as if it had come just before that.
            for kind, microbatches, *marks in trace.ops:
                start, end = [self._time(stage, mark) - zero for mark in marks]
                if kind == "R":
                    recomputed += end - start
                    continue
                each, recomputed = (end - start + recomputed) / len(microbatches), 0.0
                for k, i in enumerate(reversed(microbatches)):
                    rows[self._placement[stage]].append(Span(Op(kind, stage, i), end - (k + 1) * each, end - k * each))
        ordered = [tuple(sorted(row, key=lambda span: span[1:])) for row in rows]
        return Step(tuple(ordered), tuple(copies), tuple(peaks))

    def _time(self, stage: int, mark: Mark) -> float:
        """Milliseconds on the host's clock."""
        if isinstance(mark, float):
            return mark * 1e3
        event, host = self._zero[self._places[stage].device]
        return host * 1e3 + float(event.elapsed_time(mark))


class Recordings:
    """The recordings of a model, one at a time."""

    def __init__(self, schedule: Schedule | None, places: Sequence[Place]) -> None:
        self._schedule, self._places = schedule, places
        self.current: Recorder | None = None

    @contextmanager
    def open(self, ended: Callable[..., None] | None = None) -> Iterator[Recording]:
        """Records the steps of the block; ``ended``: see ``StageTrace``."""
        if self._schedule is None or self.current is not None:
            raise RuntimeError(
                "the model has schedule=None, or is already being recorded: expected a schedule, such as '1f1b', with "
                "loss_fn=criterion, and one `with splitpipe.record(model)` at a time."
            )
        recorder = self.current = Recorder(self._schedule, self._places, ended)
        try:
            yield recorder.recording
        finally:
            self.current = None
            recorder.finish()


def _mark(on: Stream) -> Mark:
    """The current time on a stream."""
    return perf_counter() if on is None else moment(on)
