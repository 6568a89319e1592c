"""Reordering takes less time, never more, and no more memory."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpipe.schedule import BlockOp, BuildingBlock, Costs, Op, Schedule, build, check, reorder, simulate
from splitpipe.schedule.construct.orders import v_placement
from splitpipe.schedule.op import Kind


def v_half(p: int) -> Schedule:
    """The block of v-half for even p, in slots, repeated 2p times."""
    ops = []
    for i in range(p):
        forward, back, last = 2 * i, 3 * p + 2 + 2 * i, 6 * p + 1 - i
        own = {"F": (forward, 3 * p - 2 - i), "B": (last, back)}
        free = [slot for slot in range(6) if slot not in {start % 6 for each in own.values() for start in each}]
        if (free[0] - back) % 6 > (free[1] - back) % 6:
            free.reverse()
        weights = (last + 1 + (free[1] - last - 1) % 6, back + 1 + (free[0] - back - 1) % 6)
        for c, stage in enumerate((i, 2 * p - 1 - i)):
            ops += [BlockOp("F", stage, own["F"][c]), BlockOp("B", stage, own["B"][c]), BlockOp("W", stage, weights[c])]
    return BuildingBlock(ops, v_placement(p), interval=6).repeat(2 * p)


def late_weights(p: int, m: int) -> Schedule:
    """1F1B with all W at the end."""
    whole = build("1f1b", p, m)
    rows = []
    for i, row in enumerate(whole.rows):
        kinds: dict[str, Kind] = {"F": "F", "BW": "B"}
        rows.append([Op(kinds[op.kind], *op[1:]) for op in row] + [Op("W", i, k) for k in range(m)])
    return Schedule(rows, whole.placement)


@pytest.mark.parametrize(("p", "squeezed", "least"), [(4, 6, 2.5), (8, 13, 8.5)])
def test_idle_time_goes_that_neither_order_nor_memory_needs(p: int, squeezed: float, least: float) -> None:
    repeated = v_half(p)
    found = reorder(repeated)
    assert simulate(repeated).makespan - 6 * p == squeezed
    assert simulate(found).makespan - 6 * p == least
    assert found.peak_activations == repeated.peak_activations


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (6, 9)])
def test_weights_go_into_holes(p: int, m: int) -> None:
    late, costs = late_weights(p, m), Costs()
    found = simulate(reorder(late, costs), costs)
    assert found.makespan <= simulate(build("1f1b", p, m, split=True), costs).makespan
    assert found.makespan < simulate(late, costs).makespan


@pytest.mark.parametrize(("costs", "idle"), [(Costs(3, 4, 2), 13), (Costs(3, 4, 2, 0.5), 21.5), (Costs(1, 2, 2), 4.5)])
def test_unequal_times_are_taken_as_they_are(costs: Costs, idle: float) -> None:
    found = simulate(reorder(v_half(4), costs), costs)
    assert max(found.idle) <= idle < max(simulate(v_half(4), costs).idle)


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
