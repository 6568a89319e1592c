"""The measurements on which a plan is based: the costs of layers on each kind of device."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layer:
    """The costs of one layer: of a microbatch, and once for all. Times are in milliseconds, memory in bytes."""

    forward: float
    backward_input: float
    backward_weight: float  # Computed separately by the split backward; 0 if B computes everything.
    saved: int = 0  # By F: all tensors that backward needs, including the layer's input.
    kept: int = 0  # Needed by W after B, and freed by it.
    input: int = 0  # The layer's input, which a cut before it copies.
    saved_input: int = 0  # The layer's input, as a part of ``saved``.
    saved_output: int = 0  # Its output, likewise. The next layer may save the same memory as its input.
    parameters: int = 0  # Its trained parameters; shared ones count for the first layer.
    state: int = 0  # Its other parameters, and buffers.


@dataclass(frozen=True)
class Kind:
    """One kind of device, and the costs of layers on it."""

    name: str
    layers: Mapping[int, tuple[Layer, ...]]  # By number of chunks.
    gap: float = 0.0  # The time that a worker takes from one op to the next.
    workspace: int = 0  # Bytes that matrix products of one thread on one stream take, once.


@dataclass(frozen=True)
class Link:
    """The time of a copy from one device to another."""

    latency: float = 0.0  # Milliseconds of an empty copy.
    bandwidth: float = math.inf  # Bytes per millisecond.

    def time(self, size: float) -> float:
        """Milliseconds of a copy of ``size`` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One device that stages may be on."""

    name: str  # As ``SplitPipe`` accepts it.
    kind: int  # Its number among the profile's kinds.
    memory: float = math.inf  # Bytes that the plan may use; infinite if unknown.


@dataclass(frozen=True)
class Profile:
    """The costs of layers on some devices."""

    names: tuple[str, ...]  # The layers' names.
    kinds: tuple[Kind, ...]
    devices: tuple[Device, ...]
    link: Link = field(default_factory=Link)  # Between two devices; the slowest one.
    optimizer_state: float = 2.0  # Bytes that the optimizer keeps per byte of parameters.
    tied: tuple[tuple[int, int], ...] = ()  # Pairs of layers that share a tensor, so they must be on one device.
    blockwise: bool = False  # Whether a checkpointed layer is recomputed separately, not as a part of its stage.
    # Whether each device computes as fast as if it were alone. Stages on one CPU don't: all of its threads were divided
    # among them when they were measured, and a plan has to use them all.
    own_compute: bool = True
    compile: bool | Mapping[str, Any] = False  # How layers were compiled, as for ``SplitPipe``.

    @property
    def chunks(self) -> list[int]:
        """The numbers of chunks that were measured on every kind."""
        return sorted(set.intersection(*(set(kind.layers) for kind in self.kinds)))
