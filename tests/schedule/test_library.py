"""Schedules by their names and options; what makes one impossible."""
from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from splitpipe.schedule import Op, Schedule, build, check, names, simulate
from splitpipe.schedule.construct.library import options, variants
from tests.helpers.covering import few


@pytest.mark.parametrize("name", few(5, names()))
def test_any_number_of_devices_and_microbatches_is_built_and_can_run(name: str) -> None:
    for devices, chunks in [*product(range(1, 6), [1, 2, 3, 5, 6, 7, 8, 9]), (6, 17)]:
        schedule = build(name, devices, chunks)
        check(schedule)
        assert (schedule.name, schedule.devices, schedule.microbatches) == (name, devices, chunks)
        assert type(schedule) is Schedule and schedule == build(name, devices=devices, chunks=chunks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_split_schedule_has_weight_gradients_of_their_own(name: str) -> None:
    kinds = {op.kind for row in build(name, 3, 4, split=True).rows for op in row}
    assert kinds == {"F", "B", "W"}
    assert {op.kind for row in build(name, 3, 4, split=False).rows for op in row} == {"F", "BW"}


@pytest.mark.parametrize("name", names())
def test_each_option_is_described_and_among_the_variants(name: str) -> None:
    for option in options(name):
        assert f"``{option}" in (build.__doc__ or ""), f"{option}: describe it in the docstring of build"
        tried = {variant.get(option) for variant, _ in variants(name, 4, 8, (1, 2, 3))}
        assert len(tried) > 1, f"{option}: give it values, and its default, in variants"


@pytest.mark.parametrize(("name", "options", "message"), [
    ("1f1", {}, "Did you mean '1f1b'?"),
    ("zb-h1", {"split": True}, "zb-h1 has no option 'split': it has none"),
    ("1f1b", {"split": 2}, "split=2: expected True or False"),
])
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, 4, 8, **options)


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
