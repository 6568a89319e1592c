"""A recording: the measures of a timeline, costs that are medians, and what it says of lost time and of stages."""
from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitpipe.schedule import Costs, Op, Recording, Schedule, Timeline, build, names, simulate
from splitpipe.schedule.recording import Step
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


LOST = ["unbalanced stages", "the schedule's own bubble", "copies", "waiting beyond the plan"]


@pytest.mark.parametrize(("timeline", "late", "expected"), [
    pytest.param(played(), 0, [0, 9, 0, 0], id="a bubble that equal stages have, too"),
    pytest.param(played("zb-v", 2, 4, Costs(3, 4, 2)), 0, [0, 2, 0, 0], id="equal work on every device"),
    pytest.param(played("gpipe", 2, 1, Costs([1, 3], [1, 3], 0)), 0, [0, 4, 0, 0], id="unequal stages, one microbatch"),
    # The plan takes 26; with equal stages it would take 20.
    pytest.param(played("gpipe", 2, 4, Costs([1, 3], [1, 3], 0)), 0, [6, 4, 0, 0], id="unequal stages"),
    pytest.param(played("gpipe", 2, 4, Costs(copy=0.5)), 0, [0, 3, 1, 0], id="copies that make the plan longer"),
    pytest.param(played(), 2, [0, 9, 0, 2], id="what no plan explains"),
])
def test_time_is_lost_to(timeline: Timeline, late: float, expected: list[float]) -> None:
    recording = Recording(timeline.schedule)
    recording.add(step(timeline, late=late))
    assert [near(recording.losses[reason]) for reason in LOST] == expected


def test_the_slowest_stage_is_named_with_what_to_do() -> None:
    costs = Costs([1.2, 1.1, 1.9, 1.3], [1.4, 1.3, 2.2, 1.5], [1, 1, 1.6, 1], 0.05)
    remarks = recorded(played("zb-h1", costs=costs), devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3")).remarks
    assert remarks[1] == ("Stage 2 on cuda:2 is the bottleneck: its device computes 93% of the step, the others 59% on "
                          "average.")
    assert re.fullmatch(r".* to unbalanced stages. Move a layer from stage 2 to stage 1 on cuda:1, which computes "
                        r"56%\.", remarks[3])


def test_of_several_stages_on_the_slowest_device_the_one_to_shorten_has_a_neighbour_elsewhere() -> None:
    recording = recorded(played("zb-v", 2, 8, Costs([1, 1, 3, 1], [1, 1, 3, 1], 1)), devices=("cuda:0", "cuda:1"))
    text = str(recording)
    assert "Stages 1 and 2 on cuda:1 are the bottleneck: their device computes " in text
    assert "Move a layer from stage 2 to stage 3 on cuda:0, which computes " in text


def test_equal_stages_have_no_bottleneck() -> None:
    recording = recorded(played("1f1b"))
    assert "No stage is the bottleneck: the devices compute 73% of the step." in recording.remarks
    assert "9 ms (27.3%) to the schedule's own bubble. It shrinks with more chunks" in str(recording)
    assert "unbalanced" not in str(recording)
    assert "There is one device, which computes 100% of the step." in recorded(played("gpipe", 1, 3)).remarks


def tables(recording: Recording) -> tuple[list[list[str]], list[list[str]]]:
    """The cells of the stages' and of the devices' table."""
    stages, devices = str(recording).split("\n\n")[-3:-1]
    return [line.split() for line in stages.split("\n")], [line.split() for line in devices.split("\n")]


def test_a_line_a_stage_has_medians_of_what_was_recorded() -> None:
    timeline = played("zb-v", 2, 3, Costs([1, 2, 3, 4], 5, [1, 1, 1, 1], 0.25))
    stages, _ = tables(recorded(timeline, devices=("cuda:0", "cuda:1")))
    assert stages == [["stage", "device", "F", "ms", "B", "ms", "W", "ms", "copy", "ms"],
                      ["0", "cuda:0", "1.000", "2.500", "1.000", "0.250"],
                      ["1", "cuda:1", "2.000", "2.500", "1.000", "0.250"],
                      ["2", "cuda:1", "3.000", "2.500", "1.000", "0.250"],
                      ["3", "cuda:0", "4.000", "2.500", "1.000", "0.250"]]


def test_a_line_a_device_has_its_bubble_and_its_memory() -> None:
    recording = Recording(build("1f1b", 2, 2), ("cuda:0", "cpu"))
    recording.add(step(played("1f1b", 2, 2, Costs(1, 1, [0, 1])), (3 * 2**30, None)))
    assert tables(recording)[1] == [["device", "busy", "bubble", "peak", "memory"],
                                    ["cuda:0", "50.00%", "50.00%", "3", "GiB"],
                                    ["cpu", "75.00%", "25.00%", "-"]]
