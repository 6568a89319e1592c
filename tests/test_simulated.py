"""Training on a simulated accelerator: nothing depends on luck, what orders streams is needed, no time is lost."""
from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.simulated import told

#: Places are told by qualified names.
named = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names before Python 3.11")


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    return told("paths")


@pytest.fixture(scope="module")
def places() -> dict[str, Any]:
    return told("places")


@pytest.fixture(scope="module")
def rest() -> dict[str, Any]:
    return told("rest")


def test_no_work_on_any_path_depends_on_luck(paths: dict[str, Any]) -> None:
    assert paths["cases"] > 700 and paths["hazards"] == {}


def test_every_path_trains_as_the_unwrapped_module(paths: dict[str, Any]) -> None:
    assert paths["faults"] == []


@named
def test_without_a_place_that_orders_streams_there_is_a_hazard(places: dict[str, Any]) -> None:
    assert places["missed"] == []


@named
def test_without_a_place_that_keeps_streams_apart_a_step_takes_longer(places: dict[str, Any]) -> None:
    assert places["not slower"] == []


@named
def test_every_place_that_orders_streams_is_known(places: dict[str, Any]) -> None:
    assert (places["unknown"], places["gone"]) == ([], [])


def test_a_step_takes_as_long_as_theory_says(rest: dict[str, Any]) -> None:
    found = {way: (planned, taken) for way, planned, *taken in rest["makespans"]}
    assert {way: each for way, each in found.items() if {each[0]} != set(each[1])} == {}


def test_the_drop_in_takes_the_same_time_on_every_run(rest: dict[str, Any]) -> None:
    assert [taken for _, _, *taken in rest["makespans again"]] == [[33] * 5, [30] * 5, [21] * 5, [18] * 5]


def test_a_plan_predicts_the_memory_that_devices_count(rest: dict[str, Any]) -> None:
    assert len(rest["memory"]) >= 20
    # Too high where layers share what W needs: the gradient that goes past a block is also that of its last layer.
    assert {way: each for way, each in rest["memory"].items() if not all(0.85 < part < 1.2 for part in each)} == {}


def test_a_checkpoint_is_loaded_where_it_is_wanted(rest: dict[str, Any]) -> None:
    assert rest["loaded"] == {
        "None": [["sim:0", "sim:1"], True], "cpu": [["cpu"], True], "sim:3": [["sim:3"], True]
    }
