"""Profiles that were not measured, for tests of the planner."""
from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from splitpipe.planner.profile import Device, Kind, Layer, Link, Profile

MIB = 2**20


def emulated(
    seed: int,
    layers: int = 8,
    speeds: Sequence[float] = (1, 2, 0.5),
    chunks: Sequence[int] = (1, 2, 4, 8),
    memory: Sequence[float] | float = math.inf,
    **more: Any,
) -> Profile:
    """A profile of random layers on devices of known speeds."""
    draw = random.Random(seed)
    whole = [[draw.uniform(1, 5) for _ in range(3)] for _ in range(layers)]
    sizes = [[draw.randrange(1, 9) * MIB for _ in range(3)] for _ in range(layers)]

    def kind(speed: float) -> Kind:
        return Kind(
            f"device of speed {speed}",
            {
                number: tuple(
                    Layer(*(time / number / speed for time in times), saved=2 * size // number, kept=size // number,
                          input=small // number, saved_input=small // number, parameters=own)
                    for times, (size, small, own) in zip(whole, sizes)
                )
                for number in chunks
            },
            gap=0.05,
        )

    caps = [memory] * len(speeds) if isinstance(memory, (int, float)) else list(memory)
    distinct = sorted(set(speeds))
    return Profile(
        names=tuple(map(str, range(layers))),
        kinds=tuple(map(kind, distinct)),
        devices=tuple(
            Device(f"cuda:{at}", distinct.index(speed), cap) for at, (speed, cap) in enumerate(zip(speeds, caps))
        ),
        **{"link": Link(0.02, 10 * MIB), **more},
    )
