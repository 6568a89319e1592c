"""Ops and schedules are values."""
from __future__ import annotations

import dataclasses

import pytest

import splitpipe
from splitpipe.schedule import Op, Schedule, build
from splitpipe.schedule.op import given, needed


def test_an_op_prints_as_stage_kind_and_microbatch() -> None:
    assert str(Op(kind="F", stage=0, microbatch=0)) == "0F0"
    assert str(Op("BW", 3, 12)) == "3BW12"
    assert str(build("zb-h1", devices=4, chunks=8).rows[0][0]) == "0F0"


def test_a_schedule_is_frozen() -> None:
    schedule = build("gpipe", 2, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.placement = (1, 0)  # type: ignore[misc]
    assert isinstance(schedule.rows, tuple)
    assert all(isinstance(row, tuple) for row in schedule.rows)
    assert isinstance(schedule.placement, tuple)


def test_a_schedule_is_equal_to_another_of_the_same_rows_and_can_be_a_key() -> None:
    schedule = build("1f1b", 2, 3)
    same = Schedule([list(row) for row in schedule.rows], list(schedule.placement), "another name")
    assert schedule == same
    assert {schedule: 1}[same] == 1
    assert schedule != build("gpipe", 2, 3)


def test_a_schedule_tells_its_sizes() -> None:
    schedule = build("interleaved-1f1b", 3, 6, stages_per_device=4)
    assert (schedule.devices, schedule.stages, schedule.microbatches) == (3, 12, 6)
    assert schedule.shares == (4,) * 12


def test_a_schedule_prints_a_line_a_device() -> None:
    assert str(build("1f1b", 2, 2)).splitlines() == ["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"]


@pytest.mark.parametrize(
    ("op", "needs"),
    [
        (Op("F", 0, 3), []),
        (Op("F", 2, 3), ["1F3"]),
        (Op("B", 3, 1), ["3F1"]),
        (Op("BW", 1, 1), ["1F1", "2B1"]),
        (Op("W", 3, 1), ["3B1"]),
    ],
)
def test_what_an_op_needs(op: Op, needs: list[str]) -> None:
    assert [str(need) for need in needed(op, stages=4)] == needs


def test_a_fused_backward_gives_the_input_gradient() -> None:
    assert given(Op("BW", 1, 2)) == Op("B", 1, 2)
    assert given(Op("W", 1, 2)) == Op("W", 1, 2)


def test_the_package_has_its_names_all_the_same() -> None:
    assert {"SplitPipe", "schedule", "skip", "balance"} <= set(dir(splitpipe))
    assert splitpipe.SplitPipe.__module__ == "splitpipe.pipe"
    assert splitpipe.schedule.build and splitpipe.skip.stash and splitpipe.balance.balance_by_size
    taken: dict[str, object] = {}
    exec("from splitpipe import *", taken)
    assert taken["DeferredBatchNorm"] is splitpipe.DeferredBatchNorm
    with pytest.raises(AttributeError, match="^module 'splitpipe' has no attribute 'nothing'$"):
        _ = splitpipe.nothing
