"""Checks that a schedule can run: every op once, on its stage's device, in an order without a deadlock."""
from __future__ import annotations

from typing import get_args

from splitpipe.schedule.op import Kind, Op, Schedule, dependencies, verify
from splitpipe.schedule.play import OpOrder


def check(schedule: Schedule) -> None:
    """Raises an error if a schedule can't run.

    Args:
        schedule: the schedule to check.

    Raises:
        TypeError: ``schedule`` isn't a Schedule.
        ValueError: a stage has no device; an op is on a different device than its stage, is there twice, or is missing;
            or some devices wait for each other. The message names the op and the device, and for a deadlock the cycle.

    Example:
        >>> check(Schedule([[Op("F", 0, 0), Op("W", 0, 0)]], placement=[0]))
        Traceback (most recent call last):
        ValueError: 0B0 is missing on device 0: expected F, B and W, or F and BW, of every stage ...
    """
    checked(schedule)


def checked(schedule: Schedule) -> OpOrder:
    """Verifies a schedule as ``check`` does, and returns an order in which its ops can run."""
    verify(schedule)
    _verify_places(schedule)
    where = _positions(schedule)
    _verify_all_there(schedule, where)
    order = OpOrder(schedule)
    for device, row in enumerate(schedule.rows):
        if order.reached[device] < len(row):
            raise ValueError(_deadlock(schedule, order.reached, device, where))
    return order


def _verify_places(schedule: Schedule) -> None:
    if not schedule.stages:
        raise ValueError("the schedule has no stages: expected the device of each stage as its placement.")
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.devices:
            raise ValueError(f"stage {stage} is placed on device {device}: expected one of {schedule.devices} from 0.")
    for device, row in enumerate(schedule.rows):
        for op in row:
            if op.kind not in get_args(Kind):
                raise ValueError(f"{op} on device {device} is of kind {op.kind!r}: expected F, B, W or BW.")
            if not 0 <= op.stage < schedule.stages or op.microbatch < 0:
                raise ValueError(f"{op}: expected a stage below {schedule.stages}, and microbatches counted from 0.")
            if (home := schedule.placement[op.stage]) != device:
                raise ValueError(f"{op} is on device {device}: expected it on device {home}, with its stage.")


def _positions(schedule: Schedule) -> dict[Op, int]:
    """The position of each op in its row; a BW counts as B and W."""
    where: dict[Op, int] = {}
    for device, row in enumerate(schedule.rows):
        for position, op in enumerate(row):
            parts = (op,) if op.kind != "BW" else (Op("B", *op[1:]), Op("W", *op[1:]))
            for part in parts:
                if part in where:
                    raise ValueError(
                        f"{op} is on device {device} as op {position}, and {row[where[part]]} as op {where[part]}: "
                        "expected every op once, where BW counts as both B and W."
                    )
                where[part] = position
    return where


def _verify_all_there(schedule: Schedule, where: dict[Op, int]) -> None:
    if not where:
        raise ValueError("the schedule has no ops: expected F, B and W, or F and BW, of every stage and microbatch.")
    for microbatch in range(schedule.microbatches):
        for stage, device in enumerate(schedule.placement):
            missing = [op for kind in ("F", "B", "W") if (op := Op(kind, stage, microbatch)) not in where]
            if missing:
                raise ValueError(
                    f"{' and '.join(map(str, missing))} {'is' if len(missing) == 1 else 'are'} missing on device "
                    f"{device}: expected F, B and W, or F and BW, of every stage for microbatches 0 to "
                    f"{schedule.microbatches - 1}."
                )


def _deadlock(schedule: Schedule, at: list[int], device: int, where: dict[Op, int]) -> str:
    """Finds a cycle of ops that wait for each other, and describes it."""
    seen: dict[int, int] = {}
    links: list[str] = []
    while device not in seen:
        seen[device] = len(links)
        op = schedule.rows[device][at[device]]
        need, other = next(
            (need, other)
            for need in dependencies(op, schedule.stages)
            if where[need] >= at[other := schedule.placement[need.stage]]
        )
        behind = schedule.rows[other][where[need]]  # There may be a BW instead of a B.
        head = schedule.rows[other][at[other]]
        place = "is next" if behind is head else f"comes after {head}"
        links.append(f"{op} on device {device} waits for {behind}, which {place} on device {other}")
        device = other
    cycle = links[seen[device]:]
    return f"the schedule has a deadlock, as each op waits for the next: {'; '.join(cycle)}. Change the order of one."
