"""What holds for every schedule, whatever the devices, microbatches and costs."""
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitpipe.schedule import BuildingBlock, Costs, Schedule, Tiling, build, check, from_csv, names, simulate
from tests.schedule.test_block import blocks
from tests.schedule.test_play import settled

NEAR = 1e-9
SPLIT = {"gpipe", "1f1b", "eager-1f1b"}
LOOPED = {"interleaved-1f1b", "looped-bfs", "interleaved-low-memory"}
times = st.one_of(st.integers(0, 5), st.floats(0.01, 20)).map(float)


@st.composite
def built(draw: Any) -> Schedule:
    """Any named schedule."""
    name = draw(st.sampled_from(names()))
    devices, chunks = draw(st.integers(1, 7)), draw(st.integers(1, 24))
    options: dict[str, Any] = {}
    if name in SPLIT:
        options["split"] = draw(st.booleans())
    if name in LOOPED:
        options["stages_per_device"] = draw(st.integers(1, 3))
    if name == "interleaved-low-memory" and draw(st.booleans()):
        options["group"] = draw(st.integers((devices + 1) // 2, devices))
    return build(name, devices, chunks, **options)


@st.composite
def played(draw: Any) -> tuple[Schedule, Costs]:
    """Any named schedule, with costs for each stage."""
    schedule = draw(built())
    each = st.lists(times, min_size=schedule.stages, max_size=schedule.stages)
    number_or_each = st.one_of(times, each)
    return schedule, Costs(draw(number_or_each), draw(number_or_each), draw(number_or_each), draw(times))


@given(built())
def test_every_built_schedule_can_run(schedule: Schedule) -> None:
    check(schedule)
    assert len({op for row in schedule.rows for op in row}) == sum(map(len, schedule.rows))


@given(played())
def test_no_makespan_is_below_a_bound(case: tuple[Schedule, Costs]) -> None:
    timeline = simulate(*case)
    assert set(timeline.bounds) == {"work", "head + work + tail", "chain", "memory", "ramp"}
    for reason, bound in timeline.bounds.items():
        assert timeline.makespan >= bound - NEAR * (1 + bound), reason
    assert timeline.makespan >= timeline.longest >= max(timeline.work) - NEAR
    assert -NEAR <= timeline.bubble_longest <= timeline.bubble + NEAR
    assert timeline.bubble <= 1  # 1 where copies alone take time.


@given(played())
def test_a_second_simulator_finds_the_same_times(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    spans = simulate(schedule, costs).spans
    starts, ends = settled(schedule, costs.times(schedule), costs.hops(schedule), {})
    assert [[span.start for span in row] for row in spans] == starts
    assert [[span.end for span in row] for row in spans] == ends


@given(played())
def test_more_time_never_makes_a_schedule_shorter(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    slower = Costs(costs.forward, costs.backward_input, costs.backward_weight, costs.copy + 1)
    assert simulate(schedule, slower).makespan >= simulate(schedule, costs).makespan - NEAR


@given(built())
def test_the_text_has_all_of_a_schedule(tmp_path_factory: Any, schedule: Schedule) -> None:
    path = tmp_path_factory.mktemp("text") / "schedule.csv"
    schedule.to_csv(path)
    assert from_csv(path) == schedule


@settings(max_examples=60)
@given(blocks(), st.integers(1, 7))
@pytest.mark.thorough
def test_squeeze_and_reorder_never_raise_makespan_or_peak(block: BuildingBlock, chunks: int) -> None:
    loose = block.repeat(chunks)
    tight = loose.squeeze()
    for before, after in (loose, tight), (tight, tight.reorder()), (loose, loose.reorder()):
        _no_worse(before, after, near=0)  # Times of blocks are halves.


@settings(max_examples=60)
@given(played())
@pytest.mark.thorough
def test_reorder_improves_named_schedules_or_leaves_them(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    starts = [[span.start for span in row] for row in timeline.spans]
    tiling = Tiling(schedule.rows, schedule.placement, starts, costs)
    _no_worse(tiling, tiling.squeeze())
    _no_worse(tiling, tiling.reorder())


def _no_worse(before: Tiling, after: Tiling, near: float = NEAR) -> None:
    check(after)
    assert after.makespan <= before.makespan + near * (1 + before.makespan)
    assert all(a <= b for a, b in zip(after.peak_activations, before.peak_activations))
    assert simulate(after, after.costs).makespan <= after.makespan + near * (1 + after.makespan)
