"""The fake runtime, if it is there: what streams were given, in the order in which the host gave it; failures."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["op", "copy", "record", "wait"]
#: The fake runtime, if this process has it (``tests/softcuda/softcuda.py``).
softcuda: Any = sys.modules.get("softcuda")


class Launch(NamedTuple):
    """One entry of the log: an op, a copy to another device, a record of an event, or a wait for one."""

    kind: Kind
    device: int
    stream: int  # Its number, among those of all devices.
    priority: int  # Of the stream; lower ones first.
    event: int  # Of a record and of its waits, the number of that record.
    multiplications: float  # Of a matrix product or a convolution; 0 for other ops.
    bytes: int  # That a copy moves.
    name: str


def settle() -> None:
    """Waits for all there was: what is over has used memory on other streams than it was allocated on."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    if softcuda is not None:
        softcuda.forget_hazards()


def failing(number: int, step: Callable[[], object]) -> str | None:
    """Takes a step whose allocation of that number fails: what it raises, "" if nothing. None: it has fewer."""
    start, raised = softcuda.fail_at(number), ""
    try:
        step()
    except BaseException as error:
        raised = repr(error) if not isinstance(error, torch.OutOfMemoryError) else "no memory"
    finally:
        end = softcuda.fail_at(0)
    return raised if raised or end - start >= number else None


def launches() -> list[Launch]:
    """The log since the last ``softcuda.log``."""
    found = []
    for line in softcuda.launches():
        kind, *places, work, size, name = line.split(" ", 7)
        found.append(Launch(kind, *map(int, places), float(work), int(size), name))
    return found
