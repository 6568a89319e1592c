"""What holds for every schedule, whatever the devices, microbatches and costs."""
from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from splitpipe.schedule import Costs, Schedule, build, names, simulate

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


@given(played())
def test_no_makespan_is_below_a_bound(case: tuple[Schedule, Costs]) -> None:
    timeline = simulate(*case)
    assert set(timeline.bounds) == {"work", "head + work + tail", "chain", "memory", "ramp"}
    for reason, bound in timeline.bounds.items():
        assert timeline.makespan >= bound - NEAR * (1 + bound), reason
    assert timeline.makespan >= timeline.longest >= max(timeline.work) - NEAR
    assert -NEAR <= timeline.bubble_longest <= timeline.bubble + NEAR
    assert timeline.bubble <= 1  # 1 where copies alone take time.
