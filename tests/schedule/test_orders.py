"""The named schedules: bubbles and memory as published."""
from __future__ import annotations

import pytest

from splitpipe.schedule import Costs, build, simulate

SIZES = [(1, 4), (2, 4), (3, 7), (4, 8), (4, 13), (5, 11), (8, 16), (8, 33)]


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
    assert peaks("zb-h2") == [2 * p - 1] * p
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


#: The zero bubble paper's table 5: times in ms, and its bubbles for 1f1b, zb-h1 and zb-h2.
MEASURED = [((18.522, 18.086, 9.337, 0.601), 8, 24, (0.2431, 0.1585, 0.1083)),
            ((29.935, 29.621, 19.388, 0.535), 8, 64, (0.1091, 0.0554, 0.0294)),
            ((10.402, 10.248, 7.698, 0.460), 32, 256, (0.1352, 0.0594, 0.0257))]


@pytest.mark.thorough
@pytest.mark.parametrize(("times", "p", "m", "bubbles"), MEASURED)
def test_bubbles_of_measured_times_are_the_papers(times, p, m, bubbles):
    costs = Costs(*times)
    found = [simulate(build(name, p, m), costs) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(found[0].bubble, 4), round(found[1].bubble, 4), round(found[2].bubble_longest, 4)] == list(bubbles)
