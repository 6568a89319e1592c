"""The measurements on which a plan is based: the costs of layers on some devices. Times are in milliseconds."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from splitpipe.balance.rig import Layer


@dataclass(frozen=True)
class Device:
    """One device that stages may be on."""

    name: str  # As ``SplitPipe`` accepts it.
    memory: float = math.inf  # Bytes that the plan may use; infinite if unknown.


@dataclass(frozen=True)
class Profile:
    """The costs of layers on devices of one kind."""

    names: tuple[str, ...]  # The layers' names, or those of other units between two cuts.
    layers: Mapping[int, tuple[Layer, ...]]  # Their costs by number of chunks.
    devices: tuple[Device, ...]
    gap: float = 0.0  # The time that a worker takes from one op to the next.
    latency: float = 0.0  # Of an empty copy from one device to the next.
    bandwidth: float = math.inf  # Bytes per millisecond.
    optimizer_state: float = 2.0  # Bytes that the optimizer keeps per byte of parameters.
    tied: tuple[tuple[int, int], ...] = ()  # Pairs of layers that share a tensor, so they must be on one device.
    layered: bool = True  # Whether it is of an nn.Sequential.
    # Whether each device computes as fast as if it were alone. Stages on one CPU don't: all of its threads were divided
    # among them when they were measured, and a plan has to use them all.
    own_compute: bool = True
