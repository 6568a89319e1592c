"""Simulated steps as if they had been recorded, for the tests of what a recording makes of them."""
from __future__ import annotations

from typing import Any

import pytest

from splitpipe.schedule import Costs, Recording, Timeline, build, simulate
from splitpipe.schedule.timed import Span
from splitpipe.schedule.verdict import Step


def near(expected: object) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def hops(timeline: Timeline) -> tuple[tuple[int, float], ...]:
    """The copies of a simulated step: forward from each stage to the next, and back."""
    place, copy = timeline.schedule.placement, timeline.costs().copy
    borders = [stage for stage in range(len(place) - 1) if place[stage] != place[stage + 1]]
    one = [(source, float(copy)) for stage in borders for source in (stage, stage + 1)]
    return tuple(one * timeline.schedule.microbatches)


def step(timeline: Timeline, memory: tuple[int | None, ...] = (), late: float = 0.0) -> Step:
    """A simulated step as if it had been recorded; its ops begin late."""
    spans = tuple(tuple(Span(op, start + late, end + late) for op, start, end in row) for row in timeline.spans)
    return Step(spans, hops(timeline), memory or (None,) * timeline.schedule.devices)


def recorded(*timelines: Timeline, devices: tuple[str, ...] = ()) -> Recording:
    recording = Recording(timelines[0].schedule, devices)
    for timeline in timelines:
        recording.add(step(timeline))
    return recording


def played(name: str = "1f1b", devices: int = 4, chunks: int = 8, costs: Costs | None = None) -> Timeline:
    return simulate(build(name, devices, chunks), costs)
