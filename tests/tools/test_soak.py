"""A short soak; the whole one is ``python -m tests.tools.soak --steps 2000``."""
from __future__ import annotations

import pytest

from tests.tools.soak import Count, Report, soak


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_after_steps_with_faults_of_all_sorts_nothing_is_left_behind_and_what_would_be_is_told() -> None:
    report = soak(20, seed=1)
    assert not report.grown, str(report)
    assert sum(report.did.values()) == 20
    faults = sum(number for what, number in report.did.items() if "raised" in what)
    assert faults > 3 and report.did["without a fault"] > 3
    counts = [Count(1, 1, 1, 1, 1, float(at)) for at in range(8)]
    assert Report(counts=counts).grown == []  # Memory is shown alone.
    counts[-1] = counts[-1]._replace(tensors=2)
    assert "grown: tensors" in str(Report(counts=counts))
