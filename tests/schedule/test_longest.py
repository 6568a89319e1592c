"""Searching for the shortest span of the longest device, and what the zero bubble paper's own search reaches."""
from __future__ import annotations

import pytest

from splitpipe.schedule import Costs, build, search, simulate
from splitpipe.schedule.search.word import Problem, ends, latest, length, words_of

PAPER = [
    ((18.522, 18.086, 9.337, 0.601), 8, 24, 0.1585),
    ((29.935, 29.621, 19.388, 0.535), 8, 64, 0.0554),
    ((10.402, 10.248, 7.698, 0.460), 32, 256, 0.0594),
]
UNEQUAL = Costs([3, 2, 2, 5], [3, 2, 4, 2], [1, 2, 3, 1], 0.25)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("times", "devices", "chunks", "bubble", "span"),
    [(*PAPER[0], "makespan"), (*PAPER[0], "longest"), (*PAPER[1], "longest"), (*PAPER[2], "makespan")],
)
def test_with_the_memory_of_1f1b_the_bubble_is_that_of_the_papers_search(
    times: tuple[float, float, float, float], devices: int, chunks: int, bubble: float, span: str
) -> None:
    costs = Costs(*times)
    found = search(devices, chunks, costs, memory=devices, stages_per_device=1, seconds=0.05, span=span)  # type: ignore[arg-type]
    timeline = simulate(found, costs)
    assert round(timeline.bubble if span == "makespan" else timeline.bubble_longest, 4) <= bubble
    assert max(timeline.peak_activations) <= devices


@pytest.mark.thorough
def test_the_longest_span_gets_shorter_than_any_schedules_with_a_name() -> None:
    costs = Costs(18.522, 18.086, 9.337, 0.601)
    found = simulate(search(4, 12, costs, memory=8, stages_per_device=1, seconds=1, span="longest"), costs)
    named = [simulate(build(name, 4, 12), costs).longest for name in ("1f1b", "zb-h1", "zb-h2")]
    assert max(found.work) <= found.longest < min(named) - 1
    assert max(found.peak_activations) <= 8


@pytest.mark.parametrize(("name", "options"), [("zb-h2", {}), ("zb-v", {}), ("gpipe", {"split": True}), ("v-half", {})])
def test_the_length_of_words_is_the_span_that_a_simulation_finds(name: str, options: dict[str, bool]) -> None:
    schedule = build(name, 4, 6, **options)
    costs = UNEQUAL if schedule.stages == 4 else Costs(3, 4, 2, 0.25)
    timeline, words = simulate(schedule, costs), words_of(schedule)
    for longest, span in ((False, timeline.makespan), (True, timeline.longest)):
        problem = Problem(schedule.placement, 6, costs, (12,) * 4, longest)
        assert length(problem, words) == pytest.approx(span)
        ended = ends(problem, words)
        assert ended is not None and latest(problem, ended) == length(problem, words)
        assert problem.goal <= span + 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize(("times", "devices", "chunks", "bubble"), PAPER[:2])
def test_with_twice_the_memory_the_longest_span_is_close_to_what_is_possible(
    times: tuple[float, float, float, float], devices: int, chunks: int, bubble: float
) -> None:
    # The first F goes down; the last device has all its F and B, and as many W as memory can't put off; then up again.
    # (The paper's search gets to 0.0433 and 0.0010, below this: there, B frees a part of what F takes.)
    f, b, w, copy = times
    put_off = 2 * devices
    least = (devices - 1) * (f + b + 2 * copy) + chunks * (f + b) + (chunks - put_off) * w + w
    costs = Costs(*times)
    found = search(
        devices, chunks, costs, memory=put_off, stages_per_device=1, seconds=0.5, span="longest"
    )
    timeline = simulate(found, costs)
    assert least - 1e-9 <= timeline.longest <= least * 1.001
    assert max(timeline.peak_activations) <= put_off
    assert timeline.bubble_longest < bubble
