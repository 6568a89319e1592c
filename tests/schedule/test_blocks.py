"""Blocks, repeated without collisions, and the schedules that they define: idle time and memory."""
from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest

from splitpipe.schedule import BlockOp, BuildingBlock, Costs, build, check, simulate

BLOCKS = ["v-min", "v-half", "v-zb", "1f1b-v", "two-thirds"]
thorough = pytest.mark.thorough
#: Numbers of devices.
SOME: list[object] = [1, 2, 3, 4, 5, 8, *(pytest.param(p, marks=thorough) for p in (6, 7, 9, 10, 16))]
HALVES: dict[str, Callable[[int], int]] = {"v-min": lambda p: 2 * ((p + 4) // 3),
                                           "v-half": lambda p: 2 * ((p + 2) // 2), "v-zb": lambda p: 2 * p}


@pytest.mark.parametrize("name", ["v-min", "v-half", "v-zb", "two-thirds"])
@pytest.mark.parametrize("p", SOME)
def test_no_schedule_of_that_memory_is_shorter(name: str, p: int) -> None:
    for m in (2 * p, 2 * p + 3):
        timeline = simulate(build(name, p, m))
        assert timeline.makespan == max(timeline.bounds.values())


@pytest.mark.parametrize("p", [4, 5, 7, 8, *(pytest.param(p, marks=thorough) for p in (10, 11, 15, 16))])
def test_no_1f1b_v_is_shorter_unless_3_divides_the_devices(p: int) -> None:
    timeline = simulate(build("1f1b-v", p, 2 * p))
    assert timeline.makespan == max(timeline.bounds.values())


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("p", SOME[1:])
def test_the_peak_is_its_formula(name: str, p: int) -> None:
    assert 2 * max(simulate(build(name, p, 2 * p + 1)).peak_activations) == HALVES[name](p)


@pytest.mark.parametrize(("name", "peaks"), [("1f1b-v", {4: 3, 8: 6, 16: 11}), ("two-thirds", {4: 4, 8: 6, 16: 12})])
def test_two_thirds_of_the_memory_of_1f1b(name: str, peaks: dict[int, float]) -> None:
    assert {p: max(simulate(build(name, p, 2 * p)).peak_activations) for p in peaks} == peaks


@pytest.mark.parametrize("name", [*BLOCKS, "interleaved-low-memory"])
def test_microbatches_keep_their_order_in_each_stage(name: str) -> None:
    for m in (3, 8, 21):
        schedule = build(name, 4, m)
        for row in schedule.rows:
            for _, ops in groupby(sorted(row, key=lambda op: op[:2]), key=lambda op: op[:2]):
                assert [op.microbatch for op in ops] == list(range(m))


@pytest.mark.parametrize(("p", "v"),
                         [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (8, 2), pytest.param(9, 3, marks=thorough)])
def test_smaller_groups_take_less_memory_and_more_time(p: int, v: int) -> None:
    for g in range((p + 1) // 2, p + 1):
        timeline = simulate(build("interleaved-low-memory", p, 3 * g, stages_per_device=v, group=g))
        assert max(timeline.peak_activations) == (g * (v - 1) + p) / v
        assert max(timeline.idle) == pytest.approx((2 * (p - 1) + (v - 1) * (p - g)) / v)


@pytest.mark.parametrize(("p", "g", "expected"), [(8, 3, "4 to 8"), (8, 9, "4 to 8"), (5, 2, "3 to 5")])
def test_other_groups_are_refused_with_the_range(p: int, g: int, expected: str) -> None:
    with pytest.raises(ValueError, match=f"group={g} with {p} devices: expected {expected}"):
        build("interleaved-low-memory", p, 8, group=g)


def one_f_one_b(p: int) -> BuildingBlock:
    ops = [BlockOp("F", i, i) for i in range(p)] + [BlockOp("BW", i, 3 * p - 2 - 2 * i) for i in range(p)]
    return BuildingBlock(ops, range(p), interval=3)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_the_block_of_1f1b_gives_1f1b(p: int, m: int) -> None:
    assert one_f_one_b(p).repeat(m) == build("1f1b", p, m)
    assert one_f_one_b(p).peak_activations == tuple(range(p, 0, -1))


def two_stages(second: float) -> list[BlockOp]:
    """The second stage starts then."""
    return [BlockOp("F", 0, 0), BlockOp("F", 1, second), BlockOp("BW", 1, 2), BlockOp("BW", 0, 4)]


@pytest.mark.parametrize(("block", "message"), [
    (BuildingBlock([BlockOp("F", 0, 0), BlockOp("B", 0, 1), BlockOp("W", 0, 9)], [0], interval=4),
     r"0B0, which starts at 1 .* 0W0, which starts at 9: device 0 .* slot 1 mod"),
    (BuildingBlock([BlockOp("F", 0, 0), BlockOp("BW", 0, 2)], [0], interval=3),  # It ends in the next interval.
     r"0BW0, .* collides with 0F0, .* slot 0 modulo the interval of 3"),
    (BuildingBlock(two_stages(0.5), [0, 1], interval=9),
     "1F0 starts at 0.5, and 0F0, which it needs, ends at 1: expected"),
    (BuildingBlock(two_stages(1), [0, 1], 9, Costs(copy=0.5)), r"1F0 starts at 1, .* is copied until 1\.5: expected"),
])
def test_a_pass_that_collides_or_comes_too_early_is_refused_with_both(block: BuildingBlock, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block.repeat(2)


@pytest.mark.parametrize(("ops", "message"), [
    ([BlockOp("F", 0, 0), BlockOp("B", 0, 1)], "0W0 is missing on device 0"),
    ([BlockOp("F", 0, 0), BlockOp("BW", 0, 1), BlockOp("F", 0, 4)], "0F0 is on device 0 as op"),
    ([BlockOp("F", 0, 0), BlockOp("BW", 0, 1), BlockOp("F", 0, 3, 2), BlockOp("BW", 0, 4, 2)], "missing on device 0"),
    ([], "no ops"),
])
def test_a_block_that_is_no_whole_is_refused(ops: list[BlockOp], message: str) -> None:
    block = BuildingBlock(ops, [0], interval=9)
    with pytest.raises(ValueError, match=message):
        block.repeat(1)
    with pytest.raises(ValueError, match=message):
        _ = block.peak_activations


def test_of_a_block_of_two_microbatches_all_lifespans_count_and_the_surplus_is_dropped() -> None:
    ops = [BlockOp("F", 0, 0), BlockOp("F", 0, 1, 1), BlockOp("BW", 0, 2), BlockOp("BW", 0, 4, 1)]
    block = BuildingBlock(ops, [0], interval=6)
    assert block.peak_activations == (2,)
    for m in range(1, 6):
        check(repeated := block.repeat(m))
        assert repeated.microbatches == m


def test_lifespans_of_all_stages_count() -> None:
    two = [BlockOp("F", 0, 0), BlockOp("F", 1, 1), BlockOp("BW", 1, 2), BlockOp("BW", 0, 10)]
    assert BuildingBlock(two, [0, 0], interval=6).peak_activations == (1.5,)


def test_between_stages_of_one_device_there_is_no_copy() -> None:
    BuildingBlock(two_stages(1), [0, 0], 9, Costs([1, 1], [1, 1], [1, 1], copy=0.5)).repeat(1)
