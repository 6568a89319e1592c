"""What the layers of a module were measured to take, on each kind of device: what a plan is chosen by."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    """What one layer takes for one microbatch. Times are in milliseconds, memory in bytes.

    Args:
        forward: time of F.
        backward_input: time of B.
        backward_weight: time of W, which the split engine computes apart; 0 where B computes everything.
        saved: memory taken at F, of all tensors that backward needs, the layer's input among them.
        kept: of memory, what W needs after B, and gives back.
        input: size of the layer's input: what a cut before it copies.
        saved_input: of ``saved``, what is the layer's input.
        saved_output: of ``saved``, what is its output. The next layer may save the same memory as its input.

    Raises:
        ValueError: a number is negative or not finite.
    """

    forward: float
    backward_input: float
    backward_weight: float
    saved: int = 0
    kept: int = 0
    input: int = 0
    saved_input: int = 0
    saved_output: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r}: expected a number, not negative and finite.")


@dataclass(frozen=True)
class Kind:
    """One kind of device, and what layers take on it.

    Args:
        name: of it.
        layers: for each number of chunks, what each layer takes for one microbatch.
        gap: time that a worker takes from one op to the next.
        workspace: bytes that matrix products of one thread on one stream take there, once.

    Raises:
        ValueError: there is no number of chunks, or more layers for one than for another.
    """

    name: str
    layers: Mapping[int, tuple[Layer, ...]]
    gap: float = 0.0
    workspace: int = 0

    def __post_init__(self) -> None:
        counts = {len(layers) for layers in self.layers.values()}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"{self.name}: found {sorted(counts)} layers: expected as many for each number of chunks.")


@dataclass(frozen=True)
class Link:
    """How long a copy takes from one device to another.

    Args:
        latency: milliseconds of a copy of nothing.
        bandwidth: bytes in a millisecond.

    Raises:
        ValueError: a number makes no sense.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and self.bandwidth > 0):
            raise ValueError(f"{self}: expected a latency that is not negative, and a positive bandwidth.")

    def time(self, size: float) -> float:
        """Milliseconds of a copy.

        Args:
            size: in bytes.
        """
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One device that stages may be on.

    Args:
        name: of it, as ``SplitPipe`` takes it.
        kind: its number in the profile's kinds.
        memory: bytes that the plan may use on it; infinite if nobody counts.
    """

    name: str
    kind: int
    memory: float = math.inf


@dataclass(frozen=True)
class Profile:
    """What layers take on some devices.

    Args:
        names: of the layers.
        parameters: bytes of each layer's parameters that train; shared ones count for the first layer.
        state: bytes of each layer's other parameters and buffers.
        kinds: of devices.
        devices: that there are.
        link: between two devices. The slowest counts for all.
        batch: rows of the batch.
        optimizer_state: bytes that the optimizer keeps for a byte of parameters: 2 for Adam, 0 for plain SGD.
        tied: pairs of layers that share a parameter or buffer, and so have to be on one device.
        apart: whether each device computes as fast as if it were alone. The threads of one CPU don't: all of them
            were at work when they were measured, and a plan has to use them all.

    Raises:
        ValueError: the parts are of different lengths, or a device has no kind.
    """

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    state: tuple[int, ...]
    kinds: tuple[Kind, ...]
    devices: tuple[Device, ...]
    link: Link = field(default_factory=Link)
    batch: int = 1
    optimizer_state: float = 2.0
    tied: tuple[tuple[int, int], ...] = ()
    apart: bool = True

    def __post_init__(self) -> None:
        counts = {len(self.names), len(self.parameters), len(self.state)}
        counts |= {len(layers) for kind in self.kinds for layers in kind.layers.values()}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"found {sorted(counts)} layers: expected as many names, parameters and measurements.")
        strange = [device.name for device in self.devices if not 0 <= device.kind < len(self.kinds)]
        if strange or not self.devices:
            raise ValueError(f"found devices {strange} of no kind: expected one of {len(self.kinds)} for each device.")

    @property
    def chunks(self) -> list[int]:
        """The numbers of chunks that were measured on every kind."""
        return sorted(set.intersection(*(set(kind.layers) for kind in self.kinds)))
