"""What streams were given, in the order in which the host gave it: the fake runtime's log."""
from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["op", "copy", "record", "wait"]
_KINDS: dict[str, Kind] = {"o": "op", "c": "copy", "r": "record", "w": "wait"}
#: The fake runtime, if this process has it (``tests/softcuda/softcuda.py``).
softcuda: Any = sys.modules.get("softcuda")


class Launch(NamedTuple):
    """One entry of the log.

    Attributes:
        kind: an op of the device, a copy to another device, a record of an event, or a wait for one.
        device: that the stream is of.
        stream: its number, among those of all devices.
        priority: of the stream; lower ones first.
        event: of a record and of its waits, the number of that record.
        multiplications: of a matrix product or a convolution; 0 for other ops.
        bytes: that a copy moves.
        name: of the op.
    """

    kind: Kind
    device: int
    stream: int
    priority: int
    event: int
    multiplications: float
    bytes: int
    name: str


def settle() -> None:
    """Waits for all there was: what is over has used memory on other streams than it was allocated on."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    if softcuda is not None:
        softcuda.forget_hazards()


def launches() -> list[Launch]:
    """The log since the last ``softcuda.log``."""
    return [_read(*line.split(" ", 7)) for line in softcuda.launches()]


def _read(
    kind: str, device: str, stream: str, priority: str, event: str, work: str, size: str, name: str
) -> Launch:
    return Launch(_KINDS[kind], int(device), int(stream), int(priority), int(event), float(work), int(size), name)
