"""Playing schedules: a order made once gives, at any costs, the times that follow from who waits for whom."""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from splitpipe.schedule import Costs, Op, Schedule, build, names
from splitpipe.schedule.op import given, needed
from splitpipe.schedule.play import OpOrder, Times, play


def settled(
    schedule: Schedule, times: Times, hops: Sequence[float], again: Mapping[Op, float]
) -> tuple[list[list[float]], list[list[float]]]:
    """The same by looking at all ops until none starts later than before."""
    starts = {op: 0.0 for row in schedule.rows for op in row}
    ends: dict[Op, float] = {}
    before: dict[Op, float] | None = None
    while ends != before:
        before = dict(ends)
        for row in schedule.rows:
            now = 0.0
            for op in row:
                now += again.get(op, 0.0)
                for need in needed(op, schedule.stages):
                    hop = 0.0 if need.stage == op.stage else hops[min(need.stage, op.stage)]
                    now = max(now, ends.get(need, 0.0) + hop)
                starts[op] = now - again.get(op, 0.0)
                now += times[op.kind][op.stage]
                ends[given(op)] = ends[op] = now
    return [[starts[op] for op in row] for row in schedule.rows], [[ends[op] for op in row] for row in schedule.rows]


@pytest.mark.parametrize("name", names())
def test_a_course_is_played_at_any_costs(name: str) -> None:
    schedule, draw = build(name, 4, 8), random.Random(0).random
    order = OpOrder(schedule)
    assert order.reached == [len(row) for row in schedule.rows]
    for copy, recompute, uncheckpointed in ((0.0, 0.0, 0), (0.3, 0.0, 0), (0.3, 1.0, 0), (0.0, 0.5, 2)):
        forward, b, w = ([draw() for _ in range(schedule.stages)] for _ in range(3))
        hops = [copy * draw() for _ in range(schedule.stages - 1)]
        costs = Costs(forward, b, w, hops, recompute, uncheckpointed)
        times, hops, again = costs.times(schedule), costs.hops(schedule), costs.again(schedule)
        expected = settled(schedule, times, hops, again)
        assert order.play(times, hops, again) == play(schedule, times, hops, again) == expected
        assert order.makespan(times, hops, again) == max(end for row in expected[1] for end in row)


@pytest.mark.parametrize("name", names())
def test_without_hops_copies_take_no_time(name: str) -> None:
    schedule = build(name, 3, 6)
    costs = Costs(2, 1, 1)
    times = costs.times(schedule)
    assert play(schedule, times) == settled(schedule, times, costs.hops(schedule), {})


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("name", names())
def test_nothing_waits_for_what_it_has_no_need_of(name: str, slow: int) -> None:
    """Where one stage takes much longer, one op too many waited for is seen."""
    schedule = build(name, 4, 6)
    costs = Costs([100.0 if stage % 4 == slow else 1.0 for stage in range(schedule.stages)], 1, 1)
    times, hops = costs.times(schedule), costs.hops(schedule)
    assert play(schedule, times, hops) == settled(schedule, times, hops, {})


def test_where_devices_wait_for_each_other_it_has_the_ops_before() -> None:
    schedule = Schedule(
        [[Op("F", 0, 0), Op("BW", 0, 0), Op("F", 0, 1), Op("BW", 0, 1)],
         [Op("F", 1, 1), Op("F", 1, 0), Op("BW", 1, 0), Op("BW", 1, 1)]], [0, 1],
    )
    order = OpOrder(schedule)
    assert order.reached == [1, 0]
    assert order.play(Costs(2).times(schedule)) == ([[0.0], []], [[2.0], []])


def test_an_op_before_what_it_needs_of_its_own_stage_is_never_reached() -> None:
    rows = [[Op("F", 0, 0), Op("W", 0, 0), Op("B", 0, 0)]]
    assert OpOrder(Schedule(rows, [0])).reached == [1]


def test_no_ops_take_no_time() -> None:
    schedule = Schedule([[], []], [0, 1])
    assert play(schedule, Costs().times(schedule)) == ([[], []], [[], []])
    assert OpOrder(schedule).makespan(Costs().times(schedule)) == 0
