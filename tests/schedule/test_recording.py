"""A recording is a timeline of what was measured: the same measures, and costs that are medians."""
from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitpipe.schedule import Costs, Op, Recording, Schedule, Timeline, build, names, simulate
from splitpipe.schedule.recording.step import Step
from splitpipe.schedule.timed import Span
from tests.helpers.recording import hops, near, played, recorded, step


def test_the_time_before_the_first_op_is_part_of_the_step() -> None:
    recording = Recording(played().schedule)
    recording.add(step(played(), late=2))
    assert (recording.makespan, recording.longest) == (35, 33)


def test_memory_is_the_most_of_any_step() -> None:
    recording = Recording(build("1f1b", 3, 3))
    for memory in ((5, None, 1), (3, None, 2), (4, None, None)):
        recording.add(step(played("1f1b", 3, 3), memory))
    assert recording.memory == (5, None, 2)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(names()), st.integers(1, 4), st.integers(1, 6))
def test_the_costs_of_a_simulation_come_back(data: st.DataObject, name: str, devices: int, chunks: int) -> None:
    schedule = build(name, devices, chunks)
    times = st.lists(st.floats(0.01, 20), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(data.draw(times), data.draw(times), data.draw(times), data.draw(st.floats(0, 5)))
    timeline = simulate(schedule, costs)
    recording = recorded(timeline)
    found, expected = recording.costs().times(schedule), costs.times(schedule)
    split = {op.stage for row in schedule.rows for op in row if op.kind == "B"}
    for kind, those in (("F", range(schedule.stages)), ("BW", range(schedule.stages)), ("B", split), ("W", split)):
        for stage in those:
            assert found[kind][stage] == near(expected[kind][stage])  # type: ignore[index]
    assert recording.costs().copy == (costs.copy if hops(timeline) else 0)
    assert recording.plan.makespan == near(timeline.makespan)


def test_of_a_backward_that_was_never_split_b_and_w_are_half_each() -> None:
    assert recorded(played("1f1b", 2, 3, Costs(1, 4, 2))).costs() == Costs([1, 1], [3, 3], [3, 3], 0)


def test_of_a_backward_that_was_split_at_times_the_ratio_and_the_whole_are_kept() -> None:
    schedule = Schedule([[Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("W", 0, 0), Op("BW", 0, 1)]], [0])
    row = [Span(op, start, end) for op, start, end in zip(schedule.rows[0], (0, 1, 2, 5, 6), (1, 2, 5, 6, 8))]
    recording = Recording(schedule)
    recording.add(Step((tuple(row),), (), (None,)))
    assert recording.costs() == Costs([1], [2.25], [0.75], 0)
    assert recording.plan.makespan == recording.makespan == 8


def test_the_step_of_median_makespan_is_shown() -> None:
    each = [played(costs=Costs(k, k, k)) for k in (5, 1, 2, 9, 3)]
    assert recorded(*each).spans == each[4].spans
    assert recorded(*each[:4]).spans == each[2].spans


def short(chunks: int, costs: Costs | None = None) -> Timeline:
    """A step whose batch gave fewer microbatches: the others' ops are dropped."""
    schedule = build("1f1b", 4, 8)
    rows = [[op for op in row if op.microbatch < chunks] for row in schedule.rows]
    return simulate(Schedule(rows, schedule.placement, schedule.name), costs)


def test_a_short_step_is_not_shown_but_counts_for_costs() -> None:
    recording = recorded(played(), short(3, Costs(7, 7, 7)), short(2, Costs(7, 7, 7)), short(3, Costs(7, 7, 7)))
    assert (recording.steps, recording.makespan) == (4, 33)
    assert recording.costs().forward == (4,) * 4  # 8 ops of 1, as many of 7.
    assert "4 steps were recorded; this is the one with the median makespan of 1; the others" in str(recording)


QUESTIONS: dict[str, Callable[[Recording], object]] = {
    **{name: attrgetter(name) for name in ("makespan", "bounds", "spans", "plan", "memory", "losses", "remarks")},
    "costs": Recording.costs, "str": str, "html": lambda recording: recording.to_html("never.html", played()),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_without_a_step_every_question_says_that_nothing_was_recorded(question: str) -> None:
    with pytest.raises(RuntimeError, match="nothing was recorded: expected a training step"):
        QUESTIONS[question](Recording(build("1f1b", 2, 2)))


def test_without_a_step_it_is_known_what_will_be_recorded() -> None:
    recording = Recording(build("1f1b", 2, 2), ("cpu", "cuda:0"))
    assert recording.schedule == build("1f1b", 2, 2)
    assert (recording.steps, recording.devices) == (0, ("cpu", "cuda:0"))
    assert repr(recording) == "Recording('1f1b', 0 steps)"


@pytest.mark.thorough
@settings(max_examples=30)
@given(st.data(), st.sampled_from(names()))
def test_no_bound_is_above_the_makespan_whatever_ops_took(data: st.DataObject, name: str) -> None:
    schedule = build(name, 2, 3)
    rows, times = [], st.floats(0.001, 20)
    for row in schedule.rows:
        now, spans = 0.0, []
        for op in row:
            start = now + data.draw(times)
            now = start + data.draw(times)
            spans.append(Span(op, start, now))
        rows.append(tuple(spans))
    recording = Recording(schedule)
    recording.add(Step(tuple(rows), ((0, 3.0),), (None, None)))
    assert max(recording.bounds.values()) <= recording.makespan
    assert sum(recording.losses.values()) == near(fmean(recording.idle))
    assert min(recording.losses.values()) >= 0
    assert str(recording)
