"""The checker: every op once, on its device, in an order that can run."""
from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from splitpipe.schedule import Op, Schedule, build, check, simulate

Rows = list[list[Op]]
F, B, W, BW = (lambda stage, k, kind=kind: Op(kind, stage, k) for kind in ("F", "B", "W", "BW"))


def zb(edit: Callable[[Rows], object]) -> Schedule:
    """zb-h1 on three devices, with something changed."""
    schedule = build("zb-h1", 3, 4)
    rows = [list(row) for row in schedule.rows]
    edit(rows)
    return Schedule(rows, schedule.placement)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda rows: rows[0].append(rows[1].pop(0)), "1F0 is on device 0: expected it on device 1"),
    (lambda rows: rows[2].append(B(2, 3)), r"2B3 is on device 2 as op \d+, and 2B3 as op \d+: expected every op"),
    (lambda rows: rows[1].append(BW(1, 0)), r"1BW0 is on device 1 as op 12, and 1B0 as op \d"),
    (lambda rows: rows[1].remove(F(1, 2)), "1F2 is missing on device 1"),
    (lambda rows: rows[1].remove(B(1, 2)), "1B2 is missing on device 1"),
    (lambda rows: rows[1].remove(W(1, 2)), "1W2 is missing on device 1"),
])
def test_every_op_is_there_once_on_its_device(edit: Callable[[Rows], object], message: str) -> None:
    for refuses in (check, simulate):
        with pytest.raises(ValueError, match=message):
            refuses(zb(edit))


@pytest.mark.parametrize(("schedule", "message"), [
    (Schedule([[]], []), "has no stages"),
    (Schedule([[]], [0]), "has no ops"),
    (Schedule([[F(0, 0), BW(0, 0)]], [1]), "stage 0 is placed on device 1: expected one of 1"),
    (Schedule([[F(1, 0), BW(1, 0)]], [0]), "1F0: expected a stage below 1"),
    (Schedule([[F(0, 0), BW(0, 0), F(0, 1)]], [0]), "0B1 and 0W1 are missing on device 0"),
    (Schedule([[F(0, 0), W(0, 0), B(0, 0)]], [0]), "0W0 on device 0 waits for 0B0, which comes after 0W0 on device 0"),
])
def test_what_is_no_schedule_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(schedule)


def test_a_deadlock_of_two_devices_names_the_cycle() -> None:
    rows = [[F(0, 0), BW(0, 0), F(0, 1), BW(0, 1)], [F(1, 1), F(1, 0), BW(1, 0), BW(1, 1)]]
    with pytest.raises(ValueError) as caught:
        check(Schedule(rows, [0, 1]))
    assert str(caught.value) == (
        "the schedule has a deadlock, as each op waits for the next: 0BW0 on device 0 waits for 1BW0, which comes "
        "after 1F1 on device 1; 1F1 on device 1 waits for 0F1, which comes after 0BW0 on device 0. Change the "
        "order of one."
    )
