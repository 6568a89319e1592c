"""Ops and schedules are values."""
from __future__ import annotations

import dataclasses

import pytest

from splitpipe.schedule import Op, Schedule, build
from splitpipe.schedule.op import needed


def test_a_schedule_is_frozen() -> None:
    schedule = build("gpipe", 2, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.placement = (1, 0)  # type: ignore[misc]
    assert all(isinstance(row, tuple) for row in (schedule.rows, *schedule.rows, schedule.placement))


def test_a_schedule_is_equal_to_another_of_the_same_rows_and_can_be_a_key() -> None:
    schedule = build("1f1b", 2, 3)
    same = Schedule([[(*op,) for op in row] for row in schedule.rows], list(schedule.placement), "another name")
    assert schedule == same
    assert {schedule: 1}[same] == 1
    assert schedule != build("gpipe", 2, 3)


@pytest.mark.parametrize(("op", "needs"), [
    (Op("F", 0, 3), []), (Op("F", 2, 3), ["1F3"]), (Op("B", 3, 1), ["3F1"]), (Op("BW", 1, 1), ["1F1", "2B1"]),
    (Op("W", 3, 1), ["3B1"]),
])
def test_what_an_op_needs(op: Op, needs: list[str]) -> None:
    assert [str(need) for need in needed(op, stages=4)] == needs
