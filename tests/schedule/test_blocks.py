"""Schedules defined by a block: idle time, memory, and that the blocks never collide."""
from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest

from splitpipe.schedule import build, simulate

BLOCKS = ["v-min", "v-half", "v-zb", "1f1b-v", "two-thirds"]
thorough = pytest.mark.thorough
#: Numbers of devices.
SOME: list[object] = [1, 2, 3, 4, 5, 8, *(pytest.param(p, marks=thorough) for p in (6, 7, 9, 10, 16))]
HALVES: dict[str, Callable[[int], int]] = {
    "v-min": lambda p: 2 * ((p + 4) // 3), "v-half": lambda p: 2 * ((p + 2) // 2), "v-zb": lambda p: 2 * p
}


@pytest.mark.parametrize("name", ["v-min", "v-half", "v-zb", "two-thirds"])
@pytest.mark.parametrize("p", SOME)
def test_no_schedule_of_that_memory_is_shorter(name: str, p: int) -> None:
    for m in (2 * p, 2 * p + 3):
        timeline = simulate(build(name, p, m))
        assert timeline.makespan == max(timeline.bounds.values())


@pytest.mark.parametrize(
    "p", [4, 5, 7, 8, *(pytest.param(p, marks=thorough) for p in (10, 11, 15, 16))]
)
def test_no_1f1b_v_is_shorter_unless_3_divides_the_devices(p: int) -> None:
    timeline = simulate(build("1f1b-v", p, 2 * p))
    assert timeline.makespan == max(timeline.bounds.values())


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("p", SOME[1:])
def test_the_peak_is_its_formula(name: str, p: int) -> None:
    assert 2 * max(simulate(build(name, p, 2 * p + 1)).peak_activations) == HALVES[name](p)


@pytest.mark.parametrize(
    ("name", "peaks"), [("1f1b-v", {4: 3, 8: 6, 16: 11}), ("two-thirds", {4: 4, 8: 6, 16: 12})]
)
def test_two_thirds_of_the_memory_of_1f1b(name: str, peaks: dict[int, float]) -> None:
    assert {p: max(simulate(build(name, p, 2 * p)).peak_activations) for p in peaks} == peaks


@pytest.mark.parametrize("name", [*BLOCKS, "interleaved-low-memory"])
def test_microbatches_keep_their_order_in_each_stage(name: str) -> None:
    for m in (3, 8, 21):
        schedule = build(name, 4, m)
        for row in schedule.rows:
            for _, ops in groupby(sorted(row, key=lambda op: op[:2]), key=lambda op: op[:2]):
                assert [op.microbatch for op in ops] == list(range(m))


@pytest.mark.parametrize(
    ("p", "v"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (8, 2), pytest.param(9, 3, marks=thorough)]
)
def test_smaller_groups_take_less_memory_and_more_time(p: int, v: int) -> None:
    for g in range((p + 1) // 2, p + 1):
        timeline = simulate(build("interleaved-low-memory", p, 3 * g, stages_per_device=v, group=g))
        assert max(timeline.peak_activations) == (g * (v - 1) + p) / v
        assert max(timeline.idle) == pytest.approx((2 * (p - 1) + (v - 1) * (p - g)) / v)


@pytest.mark.parametrize(("p", "g", "expected"), [(8, 3, "4 to 8"), (8, 9, "4 to 8"), (5, 2, "3 to 5")])
def test_other_groups_are_refused_with_the_range(p: int, g: int, expected: str) -> None:
    with pytest.raises(ValueError, match=f"group={g} with {p} devices: expected {expected}"):
        build("interleaved-low-memory", p, 8, group=g)
