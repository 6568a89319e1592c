"""Playing schedules: an order made once gives, at any costs, the times that follow from who waits for whom."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitpipe.schedule import Costs, Op, Schedule
from splitpipe.schedule.op import given, needed
from splitpipe.schedule.play import OpOrder, Times

Rows = list[list[float]]


def settled(schedule: Schedule, times: Times, hops: Sequence[float], again: Mapping[Op, float]) -> tuple[Rows, Rows]:
    """A second simulator: looks at all ops until none starts later than before. In a deadlock, some never settle."""
    starts: dict[Op, float] = {}
    ends: dict[Op, float] = {}
    before: dict[Op, float] | None = None
    rounds = sum(map(len, schedule.rows)) + 1
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
        rounds -= 1
        if rounds < 0:
            raise RecursionError("a deadlock")
    return [[starts[op] for op in row] for row in schedule.rows], [[ends[op] for op in row] for row in schedule.rows]


def test_where_devices_wait_for_each_other_it_has_the_ops_before() -> None:
    schedule = Schedule(
        [[Op("F", 0, 0), Op("BW", 0, 0), Op("F", 0, 1), Op("BW", 0, 1)],
         [Op("F", 1, 1), Op("F", 1, 0), Op("BW", 1, 0), Op("BW", 1, 1)]], [0, 1],
    )
    order = OpOrder(schedule)
    assert order.reached == [1, 0]
    assert order.play(Costs(2).times(schedule)) == ([[0.0], []], [[2.0], []])
