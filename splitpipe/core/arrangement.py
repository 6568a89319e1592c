"""Which schedule a model runs: one by its name, built for its stages and devices, or one that the user has made."""
from __future__ import annotations

from splitpipe.schedule.check import check
from splitpipe.schedule.construct.library import build, options
from splitpipe.schedule.op import Schedule


def arranged(schedule: str | Schedule, stages: int, devices: int | None, chunks: int) -> Schedule:
    """The schedule, verified.

    Args:
        schedule: its name, or the schedule itself.
        stages: how many the balance has.
        devices: how many were named; None: as many as it takes.
        chunks: how many microbatches.

    Raises:
        ValueError: there is no such schedule, it can't run, or does not go with these numbers.
    """
    if isinstance(schedule, str):
        return _built(schedule, stages, devices, chunks)
    check(schedule)
    _verify_fit(schedule, stages, devices, chunks)
    return schedule


def _built(name: str, stages: int, devices: int | None, chunks: int) -> Schedule:
    each = build(name, 1, 1).stages
    free = "stages_per_device" in options(name)
    if devices is None:
        devices = max(1, stages // each)
    if devices and stages == devices * each:
        return build(name, devices, chunks)
    if free and devices and stages % devices == 0:
        return build(name, devices, chunks, stages_per_device=stages // devices)
    number = "one stage" if each == 1 else f"{each} stages"
    want = "a multiple of the devices as its number of stages" if free else f"{number} for each device"
    fix = f"Give a balance of {each * max(1, devices)} numbers, or other devices."
    raise ValueError(f"balance has {stages} stages for {devices} devices: schedule {name!r} expects {want}. {fix}")


def _verify_fit(schedule: Schedule, stages: int, devices: int | None, chunks: int) -> None:
    faults = []
    if schedule.stages != stages:
        faults.append(f"it has {schedule.stages} stages: expected {stages}, as the balance has numbers")
    if devices is not None and schedule.devices != devices:
        faults.append(f"it has {schedule.devices} rows: expected {devices}, as there are devices")
    if schedule.microbatches != chunks:
        faults.append(f"it has {schedule.microbatches} microbatches: expected as many chunks, not {chunks}")
    if faults:
        raise ValueError(f"the schedule does not fit: {'; '.join(faults)}.")
