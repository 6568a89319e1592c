"""The transparency grid on a simulated accelerator, drop-in and scheduled, with a skip past all layers."""
from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulated import told
from tests.promise.layers import LAYERS


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    return told("layers")


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_does_not_depend_on_luck_and_trains_as_the_unwrapped_module(name: str, layers: dict[str, Any]) -> None:
    found = layers[f"layers: {name}"]
    assert found["cases"] and (found["hazards"], found["faults"]) == ({}, [])
