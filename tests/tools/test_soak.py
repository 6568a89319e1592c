"""A short soak; the whole one is ``python -m tests.tools.soak --steps 2000``."""
from __future__ import annotations

import pytest

from tests.tools.soak import Count, Report, soak

pytestmark = pytest.mark.timeout(60)


def test_after_steps_with_faults_of_all_sorts_gradients_are_right_and_nothing_is_left_behind() -> None:
    report = soak(60, seed=1)
    assert not report.grown, str(report)
    assert sum(report.did.values()) == 60
    faults = sum(number for what, number in report.did.items() if "raised" in what)
    assert faults > 12 and report.did["without a fault"] > 12


@pytest.mark.parametrize("name", ["threads", "tasks", "handles", "tensors", "own"])
def test_what_is_more_than_after_the_warm_up_has_grown(name: str) -> None:
    counts = [Count(1, 1, 1, 1, 1, 1.0) for _ in range(8)]
    assert Report(counts=counts).grown == []
    counts[-1] = counts[-1]._replace(**{name: 2})
    assert Report(counts=counts).grown == [name]
    assert f"grown: {name}" in str(Report(counts=counts))


def test_memory_is_shown_and_no_reason_to_fail() -> None:
    counts = [Count(1, 1, 1, 1, 1, float(at)) for at in range(8)]
    assert Report(counts=counts).grown == [] and "mib" in str(Report(counts=counts))
