"""The simulation: every op as soon as possible, and the measures that follow; bounds that nothing gets below."""
from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from splitpipe.schedule import Costs, Op, Schedule, build, simulate


def one(*ops: Op, placement: Sequence[int] = (0,)) -> Schedule:
    return Schedule([ops], placement)


def test_an_op_starts_when_its_device_is_free_and_its_input_has_arrived() -> None:
    timeline = simulate(build("1f1b", 2, 2), Costs(forward=2, backward_input=3, backward_weight=1, copy=0.5))
    spans = [[(str(span.op), span.start, span.end) for span in row] for row in timeline.spans]
    assert spans == [[("0F0", 0, 2), ("0F1", 2, 4), ("0BW0", 9, 13), ("0BW1", 15, 19)],
                     [("1F0", 2.5, 4.5), ("1BW0", 4.5, 8.5), ("1F1", 8.5, 10.5), ("1BW1", 10.5, 14.5)]]
    assert (timeline.makespan, timeline.longest) == (19, 19)
    assert timeline.work == (12, 12)
    assert timeline.idle == (7, 7)
    assert timeline.bubble == 1 - 12 / 19


def test_copies_lie_between_devices_alone_and_each_may_take_its_own_time() -> None:
    alone = one(Op("F", 0, 0), Op("F", 1, 0), Op("BW", 1, 0), Op("BW", 0, 0), placement=[0, 0])
    assert simulate(alone, Costs(copy=100)).makespan == 3
    schedule = build("1f1b", 3, 1)
    starts = [row[0].start for row in simulate(schedule, Costs(copy=[10, 0.5])).spans]
    assert starts == [0, 11, 12.5]
    assert simulate(schedule, Costs(copy=[10, 0.5])).makespan == 9 + 2 * 10.5
    assert simulate(build("zb-v", 2, 3), Costs(copy=[1, 100, 1])).makespan < 100


def test_what_is_checkpointed_is_computed_again_before_its_gradient_is_waited_for() -> None:
    timeline = simulate(build("gpipe", 2, 2), Costs(recompute=1))
    assert [[(span.start, span.end) for span in row] for row in timeline.spans] == [
        [(0, 1), (1, 2), (5, 8), (8, 11)],  # The first one was computed again meanwhile, at 4.
        [(1, 2), (2, 3), (3, 6), (6, 9)],
    ]
    assert timeline.work == (8, 8)
    uncheckpointed = simulate(build("gpipe", 2, 2), Costs(recompute=1, uncheckpointed=1))
    assert [(span.start, span.end) for span in uncheckpointed.spans[1]] == [(1, 2), (2, 3), (3, 6), (6, 8)]
    assert uncheckpointed.work == (7, 7)
    split = simulate(build("zb-h1", 1, 1), Costs(recompute=[5]))
    assert [(str(span.op), span.end - span.start) for span in split.spans[0]] == [("0F0", 1), ("0B0", 6), ("0W0", 1)]


def test_a_number_is_a_whole_devices_share_and_a_sequence_has_one_a_stage() -> None:
    schedule = build("zb-v", 2, 3)
    by_stage = simulate(schedule, Costs([1.5] * 4, (2,) * 4, [1] * 4))
    assert simulate(schedule, Costs(3, 4, 2)).spans == by_stage.spans
    uneven = simulate(build("1f1b", 3, 1), Costs(forward=[1, 2, 3], backward_input=1, backward_weight=0))
    assert uneven.work == (2, 3, 4)


def test_numbers_of_any_sort_are_times() -> None:
    numpy = pytest.importorskip("numpy")
    costs = Costs(Fraction(1, 2), numpy.arange(2), [numpy.float32(0.5), numpy.int64(3)], numpy.float64(0.25))
    assert costs == Costs(0.5, [0, 1], [0.5, 3], 0.25)


def test_bounds_are_reached_where_they_can_be() -> None:
    assert simulate(build("1f1b", 4, 8)).bounds["head + work + tail"] == 33
    assert simulate(build("1f1b", 4, 1)).bounds["chain"] == simulate(build("1f1b", 4, 1)).makespan == 12
    assert simulate(build("gpipe", 1, 5)).bounds["work"] == 15
    assert simulate(build("gpipe", 1, 5)).bounds["memory"] == 3
    alone = simulate(build("1f1b", 4, 8)).bounds
    assert alone["memory"] == 24
    assert alone["ramp"] == 33


def test_the_bubble_is_the_average_of_unequal_devices() -> None:
    timeline = simulate(build("1f1b", 2, 1), Costs(forward=[1, 3], backward_input=[1, 3], backward_weight=0))
    assert timeline.work == (2, 6)
    assert timeline.bubble == 1 - (2 + 6) / 2 / 8
    assert simulate(build("1f1b", 2, 2), Costs(0, 0, 0)).bubble == 0


@pytest.mark.parametrize("p", [2, 4, 7])
@pytest.mark.parametrize("m", [16, 40])
def test_the_ramp_of_v_placement_is_the_formula(p: int, m: int) -> None:
    timeline = simulate(build("zb-v", p, m), Costs(2, 2, 2))  # A pass of half a device takes 1.
    k = 2 * timeline.peak_activations[p - 1]
    assert timeline.bounds["ramp"] == 6 * m + 6 * p - 3 * k - 1
