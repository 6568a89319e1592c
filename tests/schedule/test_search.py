"""Search: below what is published, never over the cap; reordering: less time, never more, and no more memory."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitpipe.schedule import Costs, Op, Schedule, Timeline, build, check, names, reorder, search, simulate
from splitpipe.schedule.op import Kind
from tests.schedule.test_orders import MEASURED

REAL = Costs(forward=3, backward_input=4, backward_weight=2)
UNEQUAL = Costs(forward=[3, 2, 2, 2, 2, 2, 2, 4], backward_input=[2, 2, 2, 2, 2, 2, 2, 5],
                backward_weight=[3, 1, 1, 1, 1, 1, 1, 2])
HOPS = replace(UNEQUAL, copy=[0.7, 0, 0.2, 1, 0.2, 0, 2])
#: The bubbles that the zero bubble paper's own search reaches with 1F1B's memory: those of its ZB-H1.
PAPER = [(times, p, m, bubbles[1]) for times, p, m, bubbles in MEASURED if m < 100]  # More take seconds.
#: Of an op, zero now and then.
times = st.one_of(st.integers(0, 4), st.floats(0.01, 9)).map(float)


def found(devices: int, chunks: int, costs: Costs | None = None, memory: float | list[float] | None = None,
          stages_per_device: int | None = None, seconds: float = 0.1) -> Timeline:
    """What is found, simulated."""
    return simulate(search(devices, chunks, costs, memory, stages_per_device, seconds=seconds), costs)


@pytest.mark.parametrize(("chunks", "costs", "memory", "seconds", "most"), [
    (8, None, 2, 0.05, 29.5),  # Of equal costs what v-min, v-half and v-zb take.
    *(pytest.param(*each, marks=pytest.mark.thorough) for each in (
        (8, None, 3, 0.05, 26.5), (8, None, 4, 0.05, 25.5),
        (16, REAL, 2, 0.05, 16 * 9 + 60), (16, REAL, 3.5, 0.1, 16 * 9 + 10.5),  # What the reference search has.
        # An exact period of one microbatch: 63 * 10.5 + 29 = 690.5; the reference search has 780.
        (64, REAL, 2, 0.1, 689),
    )),
])
def test_the_makespan_is_not_above_what_is_known(chunks, costs, memory, seconds, most):
    timeline = found(4, chunks, costs, memory, 2, seconds=seconds)
    assert timeline.makespan <= most and max(timeline.peak_activations) <= memory


@pytest.mark.thorough
@pytest.mark.parametrize("costs", [None, REAL, UNEQUAL, HOPS, Costs(1, 2, 0, 0.1)])
def test_no_schedule_with_a_name_that_fits_is_shorter(costs: Costs | None) -> None:
    best = {memory: found(4, 9, costs, memory, 2, seconds=0).makespan for memory in (2, 3, 4.5, None)}
    for name in names():
        for options in ({}, {"split": True}, {"group": 2}, {"group": 3}, {"stages_per_device": 2}):
            try:
                timeline = simulate(build(name, 4, 9, **options), costs)
            except ValueError:
                continue  # No such option, or another number of stages than the costs are for.
            for memory, makespan in best.items() if timeline.schedule.stages == 8 else ():
                if memory is None or max(timeline.peak_activations) <= memory:
                    assert makespan <= timeline.makespan * (1 + 1e-12), (name, options, memory)


@pytest.mark.thorough
def test_the_same_arguments_give_the_same_schedule() -> None:
    one, other = (search(4, 7, replace(UNEQUAL, copy=0.05), 2, seconds=0.1) for _ in range(2))
    assert one == other and one.name == "search"


def test_each_device_may_have_a_memory_of_its_own() -> None:
    peaks = found(4, 8, memory=[4, 3.5, 3, 4], stages_per_device=2, seconds=0).peak_activations
    assert all(peak <= cap for peak, cap in zip(peaks, (4, 3.5, 3, 4)))


@pytest.mark.thorough
def test_stages_follow_the_costs() -> None:
    assert found(2, 4, Costs([1] * 6, 1, 1)).schedule.placement == (0, 1, 0, 1, 0, 1)
    assert found(2, 4, Costs([1, 2], 1, 1)).schedule.placement == (0, 1)
    assert found(4, 8, memory=3, stages_per_device=2).schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.thorough
def test_without_a_number_of_stages_one_and_two_are_tried() -> None:
    both = [found(4, 8, memory=3, stages_per_device=stages).makespan for stages in (1, 2)]
    assert found(4, 8, memory=3, seconds=0.4).makespan <= min(both)


@pytest.mark.thorough
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 9), times, times, times, times, st.sampled_from((1, 1.5, 2, 3, None)))
def test_whatever_the_costs_it_fits_and_is_not_below_the_bounds(devices, chunks, f, b, w, copy, memory):
    timeline = found(devices, chunks, Costs(f, b, w, copy), memory, seconds=0.02)
    assert max(timeline.peak_activations) <= (memory or chunks)
    assert timeline.makespan >= max(timeline.bounds.values()) * (1 - 1e-9)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"memory": 0.5}, "expected at least 1, as backward begins with"),
    ({"memory": [2, 0]}, "expected at least 1, as backward begins with"),
    ({"memory": [2, 2, 2]}, "expected a number, or one for each of 2"),
    ({"costs": Costs([1, 1, 1], 1, 1)}, "3 stages: expected the same number on each of 2"),
    ({"costs": Costs([1, 1], 1, 1), "stages_per_device": 2}, "2 numbers: expected one for each of 4 stages"),
    ({"costs": Costs([1, 1], [1, 1, 1, 1], 1)}, "backward_input has 4 numbers"),
    ({"costs": Costs(recompute=1)}, "recompute=1.*expected 0.*Add it to backward_input"),
    ({"costs": Costs(recompute=[0, 0, 0, 1]), "stages_per_device": 2}, "recompute=.*expected 0"),
])
def test_what_makes_no_sense_or_is_not_searched_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(**{"devices": 2, "chunks": 4, **arguments})  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("span", ["makespan", "longest"])
@pytest.mark.parametrize(("times", "devices", "chunks", "bubble"), PAPER)
def test_with_the_memory_of_1f1b_the_bubble_is_that_of_the_papers_search(times, devices, chunks, bubble, span):
    costs = Costs(*times)
    found = search(devices, chunks, costs, memory=devices, stages_per_device=1, seconds=0.05, span=span)  # type: ignore[arg-type]
    timeline = simulate(found, costs)
    assert round(timeline.bubble if span == "makespan" else timeline.bubble_longest, 4) <= bubble
    assert max(timeline.peak_activations) <= devices


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
    assert reorder(schedule, Costs()) is reorder(schedule, Costs(recompute=9)) is schedule


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
