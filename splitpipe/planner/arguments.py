"""What a caller asks a plan for, verified."""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch

from splitpipe import partition
from splitpipe.microbatch import cuts, flatten
from splitpipe.partition import Device, Place
from splitpipe.schedule.library import SCHEDULES
from splitpipe.schedule.op import Schedule

#: Microbatches for each device to choose from, if none is given.
CHUNKS = (1, 2, 4, 8)


def places_of(devices: Iterable[Device] | None) -> tuple[list[Place], list[Any]]:
    """Each device's place, and as what it was given."""
    if devices is None:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
        places = partition.verify_devices(None, count)
        return places, [place.device for place in places]
    given: Any = devices
    if not isinstance(devices, (str, bytes)) and isinstance(devices, Iterable):
        given = list(devices)
        if not given:
            raise ValueError("devices is empty: expected at least one, or None for all that torch sees.")
    places = partition.verify_devices(given, len(given) if isinstance(given, list) else 1)
    seen: list[Place] = []
    for number, place in enumerate(places):
        if place.device.type != "cpu" and place in seen:
            raise ValueError(
                f"devices[{number}] is {given[number]}, which is named before: expected each once. The plan says how "
                "many stages a device has; parts of one device are devices of their own as torch.Streams."
            )
        seen.append(place)
    return places, given


def chunks_of(
    chunks: int | Iterable[int] | None, rows: int, devices: int, schedules: Iterable[str | Schedule] | None = None
) -> list[int]:
    """The numbers of chunks to choose from, for a batch of some rows on some devices.

    A number that gives fewer microbatches counts as that: 5 rows in 4 chunks are 3 microbatches.
    """
    own = {schedule.microbatches for schedule in schedules or () if isinstance(schedule, Schedule)}
    found = _asked(chunks, rows, devices)
    return sorted({number if number in own else len(cuts(rows, number)) for number in found})


def _asked(chunks: int | Iterable[int] | None, rows: int, devices: int) -> list[int]:
    if chunks is None:
        return [number * devices for number in CHUNKS if number * devices <= rows] or [max(1, rows)]
    given: list[Any] = [chunks]
    try:
        if isinstance(chunks, Iterable) and not isinstance(chunks, (str, bytes)) and getattr(chunks, "ndim", True):
            given = list(chunks)
        found = sorted({operator.index(number) for number in given})
    except (TypeError, ValueError):
        found = []
    if not given:
        raise ValueError("chunks is empty: expected a number of microbatches, several of them, or None.")
    if not found or any(isinstance(number, bool) for number in given):
        raise TypeError(f"chunks is {chunks!r}: expected a number of microbatches, several of them, or None.")
    if found[0] < 1 or found[-1] > rows:
        raise ValueError(f"chunks is {chunks!r}: expected numbers from 1 to the batch's {rows} rows.")
    return found


def schedules_of(schedules: Iterable[str | Schedule] | None, dropin: bool) -> list[str | Schedule] | None:
    """The schedules to choose from; None: all that have a name."""
    if schedules is None:
        return None
    if isinstance(schedules, (str, bytes, Schedule)) or not isinstance(schedules, Iterable):
        raise TypeError(f"schedules is {schedules!r}: expected a list of names or Schedules, or None for all names.")
    found = list(schedules)
    for each in found:
        if not isinstance(each, Schedule) and (not isinstance(each, str) or each not in SCHEDULES):
            raise ValueError(f"schedules has {each!r}: expected a Schedule, or one of {', '.join(SCHEDULES)}.")
    if dropin:
        raise ValueError("schedules were given, but no loss_fn: expected both, since a schedule goes backward itself.")
    if not found:
        raise ValueError("schedules is empty: expected at least one, or None for all that have a name.")
    return found


def memory_of(memory: float | Sequence[float] | None, devices: int) -> list[float] | None:
    """Bytes of each device; None: what there is."""
    if memory is None:
        return None
    given: list[Any] = [memory] * devices
    if isinstance(memory, Iterable) and not isinstance(memory, (str, bytes)):
        given = list(memory)
    if any(isinstance(each, bool) or not isinstance(each, Real) for each in given):
        raise TypeError(f"memory is {memory!r}: expected a number of bytes, or one for each device.")
    if len(given) != devices:
        raise ValueError(f"memory has {len(given)} numbers: expected one for each of {devices} devices, or one.")
    if any(not each > 0 for each in given):
        raise ValueError(f"memory is {memory!r}: expected positive numbers of bytes.")
    return [_float(each) for each in given]


def number_of(name: str, value: object, what: str) -> float:
    """Refuses what is no such number, or negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: expected a number, {what}.")
    if not 0 <= _float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}: expected {what}, not negative and finite.")
    return _float(value)


def _float(value: Real) -> float:
    """The number; one that is too large for a float is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def verify_target(target: Any, rows: int) -> None:
    """Refuses a target that does not agree with the batch, as a SplitPipe would."""
    leaves, _ = flatten(target, "the target", batch=True)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if any(size != rows for size in sizes):
        raise ValueError(
            f"the target's tensors have first dimensions {sizes}, the sample's {rows}: expected the same, since both "
            "are cut into microbatches along it."
        )
