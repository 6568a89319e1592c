"""What holds for every schedule, whatever the devices, microbatches and costs."""
from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from splitpipe.schedule import BlockOp, BuildingBlock, Costs, Schedule, Tiling, build, check, from_csv, names, simulate

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
def test_a_simulation_keeps_order_devices_and_needs(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline, took = simulate(schedule, costs), costs.times(schedule)
    ends: dict[tuple[str, int, int], float] = {}
    for row in timeline.spans:
        for op, start, end in row:
            assert abs(end - start - took[op.kind][op.stage]) <= NEAR * (1 + end)
            ends["F" if op.kind == "F" else "W" if op.kind == "W" else "B", op.stage, op.microbatch] = end
        assert all(first.end <= second.start for first, second in zip(row, row[1:]))
    for row in timeline.spans:
        for (kind, stage, k), start, _ in row:
            if kind == "F" and stage:
                hop = costs.copy if schedule.placement[stage] != schedule.placement[stage - 1] else 0
                assert start >= ends["F", stage - 1, k] + hop - NEAR
            if kind == "W":
                assert start >= ends["B", stage, k]
            if kind in ("B", "BW"):
                assert start >= ends["F", stage, k]
                if stage + 1 < schedule.stages:
                    hop = costs.copy if schedule.placement[stage] != schedule.placement[stage + 1] else 0
                    assert start >= ends["B", stage + 1, k] + hop - NEAR


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


@st.composite
def blocks(draw: Any) -> BuildingBlock:
    """A block of some shape: ops one after the other, with gaps, the interval long enough to fit."""
    devices = draw(st.integers(1, 4))
    placement = draw(st.sampled_from([list(range(devices)), [*range(devices), *reversed(range(devices))]]))
    stages, split = len(placement), draw(st.booleans())
    each = st.lists(st.integers(1, 4).map(float), min_size=stages, max_size=stages)
    costs = Costs(draw(each), draw(each), draw(each), float(draw(st.integers(0, 1))))
    took = costs.times(Schedule([[]], placement))
    ops, now = [], 0.0
    for kind, order in (("F", range(stages)), ("B" if split else "BW", reversed(range(stages)))):
        for stage in order:
            now += draw(st.integers(0, 2)) + costs.copy
            ops.append(BlockOp(kind, stage, now))  # type: ignore[arg-type]
            now += took[kind][stage]  # type: ignore[index]
    for stage in range(stages) if split else ():
        ops.append(BlockOp("W", stage, now))
        now += took["W"][stage]
    return BuildingBlock(ops, placement, interval=now + draw(st.integers(0, 3)), costs=costs)


@settings(max_examples=60)
@given(blocks(), st.integers(1, 6))
def test_squeeze_and_reorder_never_raise_makespan_or_peak(block: BuildingBlock, chunks: int) -> None:
    loose = block.repeat(chunks)
    tight = loose.squeeze()
    better = tight.reorder()
    _no_worse(loose, tight)
    _no_worse(tight, better)
    _no_worse(loose, loose.reorder())
    assert all(a <= b for a, b in zip(loose.peak_activations, block.peak_activations))


@settings(max_examples=60)
@given(played())
def test_reorder_improves_named_schedules_or_leaves_them(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    starts = [[span.start for span in row] for row in timeline.spans]
    tiling = Tiling(schedule.rows, schedule.placement, starts, costs)
    _no_worse(tiling, tiling.squeeze())
    _no_worse(tiling, tiling.reorder())


def _no_worse(before: Tiling, after: Tiling) -> None:
    check(after)
    assert after.makespan <= before.makespan + NEAR * (1 + before.makespan)
    assert all(a <= b for a, b in zip(after.peak_activations, before.peak_activations))
    assert simulate(after, after.costs).makespan <= after.makespan + NEAR * (1 + after.makespan)
