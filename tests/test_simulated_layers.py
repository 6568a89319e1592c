"""The transparency grid on a simulated accelerator, drop-in and scheduled, with a skip past all layers."""
from __future__ import annotations

import pytest

from tests.simulated import told

PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
def test_no_layer_depends_on_luck_and_all_train_as_the_unwrapped_module(part: int) -> None:
    found = told("layers", "--part", str(part), str(PARTS))
    assert found["cases"] > 400
    assert (found["hazards"], found["faults"]) == ({}, [])
