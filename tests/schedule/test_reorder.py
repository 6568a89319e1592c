"""Reordering takes less time, never more, and no more memory."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpipe.schedule import Costs, Op, Schedule, build, check, reorder, simulate
from splitpipe.schedule.op import Kind


def late_weights(p: int, m: int) -> Schedule:
    """1F1B with all W at the end."""
    whole = build("1f1b", p, m)
    rows = []
    for i, row in enumerate(whole.rows):
        kinds: dict[str, Kind] = {"F": "F", "BW": "B"}
        rows.append([Op(kinds[op.kind], *op[1:]) for op in row] + [Op("W", i, k) for k in range(m)])
    return Schedule(rows, whole.placement)


@pytest.mark.parametrize("costs", [Costs(), Costs(3, 4, 2, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (6, 9)])
def test_weights_go_into_holes(p: int, m: int, costs: Costs) -> None:
    late = late_weights(p, m)
    found = simulate(reorder(late, costs), costs)
    assert found.makespan <= simulate(build("1f1b", p, m, split=True), costs).makespan
    assert found.makespan < simulate(late, costs).makespan


def test_what_can_not_get_better_stays_as_it_is() -> None:
    schedule = build("1f1b", 4, 8)
    assert reorder(schedule, Costs()) is schedule


def test_memory_that_is_offered_is_taken_up_to_there() -> None:
    lazy, costs = build("1f1b", 4, 8), Costs(copy=1)
    makespans = [simulate(reorder(lazy, costs, memory), costs).makespan for memory in (0, 1, 3, 5, 7)]
    assert makespans == sorted(makespans, reverse=True) and makespans[-1] < makespans[0]
    assert makespans[0] == simulate(lazy, costs).makespan
    assert makespans[-1] <= simulate(build("eager-1f1b", 4, 8), costs).makespan
    assert all(one <= max(3, before) for one, before in zip(reorder(lazy, costs, 3.9).peak_activations, (4, 3, 2, 1)))


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
