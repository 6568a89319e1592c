"""A simulated accelerator: contexts and priorities, and a step takes as long as theory says."""
from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulated import told

#: What the process that they start does takes long; that a step depends on no luck shows in its paths and layers.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def rest() -> dict[str, Any]:
    return told("rest")


def test_no_context_is_made_on_a_device_that_computes_nothing(rest: dict[str, Any]) -> None:
    assert (rest["contexts"]["made"], rest["contexts"]["all"]) == ([1, 2], [0, 1, 2])


def test_every_thread_has_its_devices_context_before_its_first_product(rest: dict[str, Any]) -> None:
    assert rest["contexts"]["unbound"] == []


def test_nobody_holds_the_interpreters_lock_while_the_driver_has_an_event(rest: dict[str, Any]) -> None:
    assert rest["contexts"]["locked"] == 0


def test_copies_go_first_and_weight_gradients_behind_stages_that_do(rest: dict[str, Any]) -> None:
    assert rest["priorities"] == {
        "default: copies": [-1], "default: products": [0], "first: copies": [-1], "first: products": [-1, 0]
    }


def test_data_parallelism_is_refused_where_gradients_come_from_streams_that_it_does_not_know(
    rest: dict[str, Any]
) -> None:
    refused = ["a SplitPipe inside DistributedDataParallel compute"] * 2
    assert rest["reduced"] == {
        "default": [], "caller's": refused, "parts": refused, "not synchronized": [], "another's": []
    }


@pytest.mark.parametrize("where", ["few streams", "generic streams"])
def test_no_work_depends_on_how_many_streams_there_are_and_of_what_class(where: str, rest: dict[str, Any]) -> None:
    assert rest[where] == []


def test_a_step_takes_as_long_as_theory_says(rest: dict[str, Any]) -> None:
    found = {way: (planned, taken) for way, planned, *taken in rest["makespans"]}
    assert {way: each for way, each in found.items() if {each[0]} != set(each[1])} == {}


def test_the_drop_in_takes_the_same_time_on_every_run(rest: dict[str, Any]) -> None:
    assert [taken for _, _, *taken in rest["makespans again"]] == [[33] * 5, [30] * 5, [21] * 5, [18] * 5]


def test_a_plan_predicts_the_memory_that_devices_count(rest: dict[str, Any]) -> None:
    assert len([way for way in rest["memory"] if "by cuts" in way]) >= 10 and len(rest["memory"]) >= 30
    # Too high where layers share what W needs: the gradient that goes past a block is also that of its last layer.
    assert {way: each for way, each in rest["memory"].items() if not all(0.85 < part < 1.2 for part in each)} == {}


def test_a_checkpoint_is_loaded_where_it_is_wanted(rest: dict[str, Any]) -> None:
    assert rest["loaded"] == {
        "None": [["sim:0", "sim:1"], True], "cpu": [["cpu"], True], "sim:3": [["sim:3"], True]
    }
