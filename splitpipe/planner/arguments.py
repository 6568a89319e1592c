"""The checks of the arguments of ``splitpipe.plan``."""
from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch

from splitpipe import checks
from splitpipe.core.microbatch import cuts, flatten, verify_filled, verify_strided
from splitpipe.core.stream import Device, Place
from splitpipe.schedule.construct.library import SCHEDULES
from splitpipe.schedule.op import Schedule, listed
from splitpipe.schedule.plurals import counted

# Microbatches per device to choose from, by default.
CHUNKS = (1, 2, 4, 8)


def places_of(devices: Iterable[Device] | None, layers: int) -> tuple[list[Place], str]:
    """Each device's place, and a note for the plan."""
    if devices is None:
        if not torch.accelerator.is_available():
            stages = min(2, layers)
            return checks.verify_devices(["cpu"] * stages, stages), (
                f"torch sees no accelerator: this plan is for {counted(stages, 'stage')} that run on the CPU at once. "
                'devices=["cpu"] * n plans for n.'
            )
        return checks.verify_devices(None, torch.accelerator.device_count()), ""
    given = checks.verify_listed(devices, 1) or []
    if not given:
        raise ValueError("devices is empty: expected at least one, or None for all accelerators.")
    places = checks.verify_devices(given, len(given))
    for number, place in enumerate(places):
        if place.stream is not None:
            raise TypeError(
                f"devices[{number}] is {given[number]}: expected its device, since the plan is for whole devices."
            )
        if place.device.type != "cpu" and place in places[:number]:
            raise ValueError(
                f"devices[{number}] is {given[number]}, which was given before: expected each device once. The plan "
                "chooses the number of stages per device."
            )
    return places, ""


def chunks_of(
    chunks: int | Iterable[int] | None, rows: int, devices: int, schedules: Iterable[str | Schedule] | None = None
) -> list[int]:
    """The numbers of chunks to choose from, for a batch of ``rows`` rows on some devices."""
    own = {schedule.microbatches for schedule in schedules or () if isinstance(schedule, Schedule)}
    found = _asked(chunks, rows, devices)
    return sorted({number if number in own else len(cuts(rows, number)) for number in found})


def _asked(chunks: int | Iterable[int] | None, rows: int, devices: int) -> list[int]:
    if chunks is None:
        return [number * devices for number in CHUNKS if number * devices <= rows] or [rows]
    several = _unordered(chunks)
    given: list[Any] = [chunks] if several is None else several
    if not given:
        raise ValueError("chunks is empty: expected a number of microbatches, a list of numbers, or None.")
    if not all(map(checks.is_integer, given)):
        raise TypeError(f"chunks is {chunks!r}: expected a number of microbatches, a list of numbers, or None.")
    found = sorted({operator.index(number) for number in given})
    if found[0] < 1 or found[-1] > rows:
        raise ValueError(f"chunks is {chunks!r}: expected numbers from 1 to the batch's {counted(rows, 'row')}.")
    return found


def _unordered(value: object) -> list[Any] | None:
    return list(value) if isinstance(value, (set, frozenset)) else listed(value)


def schedules_of(schedules: Iterable[str | Schedule] | None, dropin: bool) -> list[str | Schedule] | None:
    """The schedules to choose from; None: all named ones."""
    if schedules is None:
        return None
    found = _unordered(schedules)
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


def memory_of(memory: float | Sequence[float] | None, devices: int) -> list[float] | None:
    """The bytes that the plan may use on each device; None: all free ones."""
    if memory is None:
        return None
    several = listed(memory)
    given: list[Any] = [memory] * devices if several is None else several
    if any(isinstance(each, bool) or not isinstance(each, Real) for each in given):
        raise TypeError(f"memory is {memory!r}: expected a number of bytes, or one per device.")
    if len(given) != devices:
        raise ValueError(
            f"memory has {counted(len(given), 'number')}: expected one for each of {counted(devices, 'device')}, or a "
            "single number."
        )
    if any(not each > 0 for each in given):
        raise ValueError(f"memory is {memory!r}: expected positive numbers of bytes.")
    return [checks.finite(each) for each in given]


def verify_target(target: Any, rows: int) -> None:
    """Raises for a target that doesn't match the batch, as a SplitPipe would."""
    leaves, _ = flatten(target, "the target", batch=True)
    verify_strided(leaves, "the target")
    verify_filled(leaves, "the target")
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if any(size != rows for size in sizes):
        raise ValueError(
            f"the target's tensors have first dimensions {sizes}, the sample's {rows}: expected the same, since both "
            "are split into microbatches along it."
        )
