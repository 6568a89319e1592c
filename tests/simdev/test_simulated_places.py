"""What orders streams is needed: without it there is a hazard on a simulated accelerator, or a step takes longer."""
from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.helpers.simulated import told

#: What the process that they start does takes long; that a step depends on no luck shows in its paths and layers.
pytestmark = pytest.mark.thorough

#: Places are told by qualified names.
named = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names before Python 3.11")


@pytest.fixture(scope="module")
def places() -> dict[str, Any]:
    return told("places")


@named
def test_without_a_place_that_orders_streams_there_is_a_hazard(places: dict[str, Any]) -> None:
    assert places["missed"] == []


@named
def test_without_a_place_that_keeps_streams_apart_a_step_takes_longer(places: dict[str, Any]) -> None:
    assert places["not slower"] == []


@named
def test_every_place_that_orders_streams_is_known(places: dict[str, Any]) -> None:
    assert (places["unknown"], places["gone"]) == ([], [])
