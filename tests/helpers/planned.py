"""Profiles that were not measured, for tests of the planner."""
from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from splitpipe.balance.rig import Layer
from splitpipe.planner.measure import Device, Profile

MIB = 2**20


def emulated(
    seed: int, layers: int = 8, devices: int = 3, chunks: Sequence[int] = (1, 2, 4, 8),
    memory: Sequence[float] | float = math.inf, **more: Any,
) -> Profile:
    """A profile of random layers."""
    draw = random.Random(seed)
    whole = [[draw.uniform(1, 5) for _ in range(3)] for _ in range(layers)]
    sizes = [[draw.randrange(1, 9) * MIB for _ in range(3)] for _ in range(layers)]
    caps = [memory] * devices if isinstance(memory, (int, float)) else memory
    return Profile(
        names=tuple(map(str, range(layers))),
        layers={
            number: tuple(
                Layer(*(time / number for time in times), saved=2 * size // number, kept=size // number,
                      input=small // number, shared=small // number, parameters=own)
                for times, (size, small, own) in zip(whole, sizes)
            )
            for number in chunks
        },
        devices=tuple(Device(f"cuda:{at}", cap) for at, cap in enumerate(caps)),
        **{"gap": 0.05, "latency": 0.02, "bandwidth": 10 * MIB, **more},
    )
