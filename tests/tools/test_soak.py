"""A short soak; the whole one is ``python -m tests.tools.soak --steps 2000``."""
from __future__ import annotations

import pytest

from tests.tools.soak import grown, soak


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_after_steps_with_faults_of_all_sorts_nothing_is_left_behind_and_what_would_be_is_told() -> None:
    did, counts = soak(20, seed=1)
    assert grown(counts) == []
    assert did.total() == 20 and did["without a fault"] > 3
    assert sum(number for what, number in did.items() if "raised" in what) > 3
    assert grown([*counts, {**counts[-1], "tensors": counts[-1]["tensors"] + 1}]) != []
