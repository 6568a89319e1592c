"""What looks measured: simulated steps as if they had been recorded, and profiles of random layers for the planner."""
from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from splitpipe.balance.rig import Layer
from splitpipe.planner.measure import Device, Profile
from splitpipe.schedule import Costs, Recording, Timeline, build, simulate
from splitpipe.schedule.recording import Step
from splitpipe.schedule.timed import Span


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


MIB = 2**20


def emulated(seed: int, layers: int = 8, devices: int = 3, chunks: Sequence[int] = (1, 2, 4, 8),
             memory: Sequence[float] | float = math.inf, **more: Any) -> Profile:
    """A profile of random layers."""
    draw = random.Random(seed)
    whole = [[draw.uniform(1, 5) for _ in range(3)] for _ in range(layers)]
    sizes = [[draw.randrange(1, 9) * MIB for _ in range(3)] for _ in range(layers)]
    caps = [memory] * devices if isinstance(memory, (int, float)) else memory
    return Profile(
        names=tuple(map(str, range(layers))),
        layers={number: tuple(Layer(*(time / number for time in times), saved=2 * size // number, kept=size // number,
                                    input=small // number, shared=small // number, parameters=own)
                              for times, (size, small, own) in zip(whole, sizes))
                for number in chunks},
        devices=tuple(Device(f"cuda:{at}", cap) for at, cap in enumerate(caps)),
        **{"gap": 0.05, "latency": 0.02, "bandwidth": 10 * MIB, **more},
    )
