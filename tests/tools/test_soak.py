"""A short soak; the whole one is ``python -m tests.tools.soak --steps 2000``."""
from __future__ import annotations

import pytest

from tests.tools.soak import grown, soak


@pytest.mark.timeout(60)
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the loss of the last call was dropped")
def test_after_steps_with_faults_of_all_sorts_nothing_is_left_behind_and_what_would_be_is_told() -> None:
    counts = soak(20, seed=1)
    assert grown(counts) == []
    assert grown([*counts, {**counts[-1], "tensors": counts[-1]["tensors"] + 1}]) != []
