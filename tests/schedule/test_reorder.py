"""Reordering takes less time, never more, and no more memory."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpipe.schedule import Costs, Op, Schedule, Tiling, build, check, simulate
from splitpipe.schedule.construct.reorder import reorder
from splitpipe.schedule.op import Kind


def late_weights(p: int, m: int) -> Schedule:
    """1F1B with all W at the end."""
    whole = build("1f1b", p, m)
    rows = []
    for i, row in enumerate(whole.rows):
        kinds: dict[str, Kind] = {"F": "F", "BW": "B"}
        rows.append([Op(kinds[op.kind], *op[1:]) for op in row] + [Op("W", i, k) for k in range(m)])
    return Schedule(rows, whole.placement)


@pytest.mark.parametrize(("p", "m", "costs", "late", "makespan"), [
    (2, 2, Costs(), 8, 7), (4, 8, Costs(), 30, 27), (6, 9, Costs(), 37, 32), (4, 8, Costs(3, 4, 2), 93, 81),
    (4, 8, Costs(3, 4, 2, 0.5), 101, 83), (4, 8, Costs(1, 2, 2), 49, 49),  # Nothing gets better: it stays as it is.
])
def test_weights_go_into_holes(p: int, m: int, costs: Costs, late: float, makespan: float) -> None:
    schedule = late_weights(p, m)
    found = reorder(schedule, costs)
    assert (simulate(schedule, costs).makespan, simulate(found, costs).makespan) == (late, makespan)
    assert (found is schedule) is (late == makespan)


def test_memory_that_is_offered_is_taken_up_to_there() -> None:
    tiling = Tiling((lazy := build("1f1b", 4, 8)).rows, lazy.placement, (), costs := Costs(copy=1)).squeeze()
    makespans = [tiling.reorder(memory).makespan for memory in (0, 1, 3, 5, 7)]
    assert makespans == sorted(makespans, reverse=True) and makespans[-1] < makespans[0] == tiling.makespan
    assert makespans[-1] <= simulate(build("eager-1f1b", 4, 8), costs).makespan
    assert all(one <= max(3, before) for one, before in zip(tiling.reorder(3.9).peak_activations, (4, 3, 2, 1)))


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_from_any_order_it_gets_no_worse(p: int, m: int, data: st.DataObject) -> None:
    schedule = late_weights(p, m)
    each = st.lists(st.sampled_from([0, 0.5, 1, 3]), min_size=p, max_size=p)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(st.sampled_from([0, 0.7])))
    before, found = simulate(schedule, costs), reorder(schedule, costs)
    check(found)
    after = simulate(found, costs)
    assert after.makespan <= before.makespan
    assert all(one <= other for one, other in zip(after.peak_activations, before.peak_activations))
    assert [sorted(row) for row in found.rows] == [sorted(row) for row in schedule.rows]
