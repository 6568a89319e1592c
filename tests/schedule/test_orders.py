"""The named schedules: makespan, bubbles and memory as published."""
from __future__ import annotations

import pytest

from splitpipe.schedule import Costs, build, simulate

#: p=4, m=8, F=B=W=1: makespan, longest span, peak of each device.
SMALL = [
    ("gpipe", 33, 33, (8, 8, 8, 8)),
    ("1f1b", 33, 33, (4, 3, 2, 1)),
    ("eager-1f1b", 33, 33, (7, 5, 3, 1)),
    ("zb-h1", 27, 27, (4, 4, 4, 4)),
    ("zb-h2", 27, 24, (7, 7, 7, 7)),
    ("interleaved-1f1b", 28.5, 28.5, (5.5, 4.5, 3.5, 2.5)),
    ("interleaved-low-memory", 27, 27, (4, 3.5, 3, 2.5)),
    ("looped-bfs", 28.5, 28.5, (8, 8, 8, 8)),
    ("zb-v", 25.5, 24, (4, 4, 4, 4)),
    ("dualpipe-v", 25.5, 25.5, (4.5, 4.5, 4.5, 4.5)),
    ("1f1b-v", 31.5, 31.5, (3, 3, 3, 3)),
    ("v-min", 29.5, 29.5, (2, 2, 2, 2)),
    ("v-half", 26.5, 26.5, (3, 3, 3, 3)),
    ("v-zb", 25.5, 25.5, (4, 4, 4, 4)),
]
SIZES = [(1, 4), (2, 4), (3, 7), (4, 8), (4, 13), (5, 11), (8, 16), (8, 33)]


@pytest.mark.parametrize(("name", "makespan", "longest", "peak"), SMALL)
def test_numbers_of_four_devices_and_eight_microbatches(
    name: str, makespan: float, longest: float, peak: tuple[float, ...]
) -> None:
    timeline = simulate(build(name, 4, 8))
    assert (timeline.makespan, timeline.longest, timeline.peak_activations) == (makespan, longest, peak)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", [Costs(), Costs(3, 4, 2), Costs(2, 2, 1.5)])
def test_idle_of_each_order_is_its_formula(p: int, m: int, costs: Costs) -> None:
    f, b, w = costs.forward, costs.backward_input, costs.backward_weight
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        assert simulate(build(name, p, m), costs).idle == ((p - 1) * (f + b + w),) * p
    if m >= p:
        assert max(simulate(build("zb-h1", p, m), costs).idle) == pytest.approx((p - 1) * (f + b - w))
    whole = -(-m // p) * p
    for v in (1, 2, 3):
        found = simulate(build("looped-bfs", p, whole, stages_per_device=v), costs)
        assert found.idle == pytest.approx(((p - 1) * (f + b + w) / v,) * p)
        found = simulate(build("interleaved-1f1b", p, whole, stages_per_device=v), costs)
        assert found.idle == pytest.approx(((p - 1) * (f + b + w) / v,) * p)
        found = simulate(build("interleaved-low-memory", p, whole, stages_per_device=v), costs)
        assert max(found.idle) == pytest.approx((p - 1) * (f + b) / v)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_peaks_are_the_published_ones(p: int, m: int) -> None:
    def peaks(name: str, **options: int) -> list[float]:
        return list(simulate(build(name, p, m, **options)).peak_activations)

    assert peaks("gpipe") == [m] * p
    assert peaks("1f1b") == [p - i for i in range(p)]
    assert peaks("eager-1f1b") == [2 * (p - 1 - i) + 1 for i in range(p)]
    assert peaks("zb-h1") == [p] * p
    assert max(peaks("zb-v")) == p
    assert peaks("dualpipe-v") == [p + 0.5] * p
    for v in (2, 3):
        if m % p == 0 and m > 2 * p:
            found = peaks("interleaved-1f1b", stages_per_device=v)
            assert found == pytest.approx([(2 * (p - 1 - i) + (v - 1) * p + 1) / v for i in range(p)])
            found = peaks("interleaved-low-memory", stages_per_device=v)
            assert found == pytest.approx([(p * v - i) / v for i in range(p)])


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 8), (8, 16), (8, 40)])
def test_zb_v_and_dualpipe_v_idle_as_published(p: int, m: int) -> None:
    timeline = simulate(build("zb-v", p, m))
    assert timeline.longest == 3 * m
    if m >= 2 * p:
        assert simulate(build("dualpipe-v", p, m)).idle == ((p - 1) / 2,) * p


#: 2BP's table, for p = 2 to 8: bubble fused and split, by its formulas.
TWO_BP = [
    ("gpipe", lambda p: 1, lambda p: (p - 1) / p, lambda p: 2 * (p - 1) / (2 * p + 1)),
    ("gpipe", lambda p: p, lambda p: (p - 1) / (2 * p - 1), lambda p: 2 * (p - 1) / (5 * p - 2)),
    ("1f1b", lambda p: p, lambda p: (p - 1) / (2 * p - 1), lambda p: (p - 1) / (4 * p - 1)),
    ("1f1b", lambda p: 2 * p, lambda p: (p - 1) / (3 * p - 1), lambda p: (p - 1) / (7 * p - 1)),
]


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("name", "chunks", "fused", "split"), TWO_BP)
def test_two_bp_has_its_bubbles(name, chunks, fused, split, p: int) -> None:  # type: ignore[no-untyped-def]
    assert simulate(build(name, p, chunks(p))).bubble == pytest.approx(fused(p))
    assert simulate(build(name, p, chunks(p), split=True)).bubble == pytest.approx(split(p))


#: The zero bubble paper's table 5: times in ms, and its bubbles for 1f1b, zb-h1 and zb-h2.
MEASURED = [
    ((18.522, 18.086, 9.337, 0.601), 8, 24, (0.2431, 0.1585, 0.1083)),
    ((29.935, 29.621, 19.388, 0.535), 8, 64, (0.1091, 0.0554, 0.0294)),
    ((10.402, 10.248, 7.698, 0.460), 32, 256, (0.1352, 0.0594, 0.0257)),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("times", "p", "m", "bubbles"), MEASURED)
def test_bubbles_of_measured_times_are_the_papers(
    times: tuple[float, float, float, float], p: int, m: int, bubbles: tuple[float, float, float]
) -> None:
    costs = Costs(*times)
    found = [simulate(build(name, p, m), costs) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(found[0].bubble, 4), round(found[1].bubble, 4), round(found[2].bubble_longest, 4)] == list(bubbles)
