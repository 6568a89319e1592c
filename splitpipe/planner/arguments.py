"""The checks of the arguments of ``splitpipe.plan``."""
from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch

from splitpipe import checks
from splitpipe.core.stream import Device, Place
from splitpipe.microbatch.rows import cuts
from splitpipe.partition.by_bytes import memory_of
from splitpipe.schedule.construct.library import SCHEDULES
from splitpipe.schedule.op import Schedule, counted, listed

_CHUNKS = (1, 2, 4, 8)  # Microbatches per device to choose from, by default.
_USABLE = 0.9  # The fraction of an accelerator's free memory that a plan uses; the rest is for fragmentation.


def places_of(devices: Iterable[Device] | None) -> list[Place]:
    """Each device's place; by default, all accelerators, or two stages on the CPU."""
    places = checks.resolve_devices(checks.accelerators() or ["cpu", "cpu"] if devices is None else devices)
    if not places:
        raise ValueError("devices is empty: expected at least one, or None for all accelerators.")
    for number, place in enumerate(places):
        if place.stream is not None or place.device.type != "cpu" and place in places[:number]:
            raise ValueError(f"devices[{number}] is {place}: expected whole devices, each once, and no streams.")
    kinds = {
        "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        for device in [place.device for place in places]
    }
    if len(kinds) > 1:
        raise ValueError(f"devices are of several kinds ({', '.join(sorted(kinds))}): expected devices of one.")
    return places


def chunks_of(
    chunks: int | Iterable[int] | None, rows: int, devices: int, schedules: Iterable[str | Schedule] | None = None
) -> list[int]:
    """The numbers of chunks to choose from, for a batch of ``rows`` rows on some devices."""
    own = {schedule.microbatches for schedule in schedules or () if isinstance(schedule, Schedule)}
    if chunks is None:
        chunks = [number * devices for number in _CHUNKS if number * devices <= rows] or [rows]
    found: list[Any] | None = [chunks] if checks.is_integer(chunks) else listed(chunks)
    if found is None or not all(map(checks.is_integer, found)):
        raise TypeError(f"chunks is {chunks!r}: expected a number of microbatches, a list of numbers, or None.")
    numbers = [operator.index(number) for number in found]
    if not numbers or min(numbers) < 1 or max(numbers) > rows:
        raise ValueError(f"chunks is {chunks!r}: expected numbers from 1 to the batch's {counted(rows, 'row')}.")
    return sorted({number if number in own else len(cuts(rows, number)) for number in numbers})


def schedules_of(schedules: Iterable[str | Schedule] | None, dropin: bool) -> list[str | Schedule] | None:
    if schedules is None:
        return None
    found = listed(schedules)
    if found is None:
        raise TypeError(f"schedules is {schedules!r}: expected a list of names or Schedules, or None for all names.")
    for each in found:
        if not isinstance(each, Schedule) and (not isinstance(each, str) or each not in SCHEDULES):
            raise ValueError(f"schedules has {each!r}: expected a Schedule, or one of {', '.join(SCHEDULES)}.")
    if dropin:
        raise ValueError("schedules were given, but no loss_fn: expected both, since a schedule runs backward itself.")
    if not found:
        raise ValueError("schedules is empty: expected at least one, or None for all named ones.")
    return found


def room_of(memory: float | Sequence[float] | None, places: Sequence[Place], module: Any) -> list[float]:
    """The bytes that the plan may use on each device: the given ones, or its share of the free ones."""
    if memory is None:
        free = [memory_of(place.device, module) for place in places]
        return [float("inf") if size is None else size * _USABLE for size in free]
    several = listed(memory)
    given: list[Any] = [memory] * len(places) if several is None else several
    if any(isinstance(each, bool) or not isinstance(each, Real) for each in given):
        raise TypeError(f"memory is {memory!r}: expected a number of bytes, or one per device.")
    if len(given) != len(places) or any(not each > 0 for each in given):
        raise ValueError(f"memory is {memory!r}: expected positive bytes, or {counted(len(places), 'number')} of them.")
    return [checks.finite(each) for each in given]
