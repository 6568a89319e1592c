"""Memory on a simulated accelerator: what is read after a call, what is counted, and allocations that fail."""
from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulated import told
from tests.simdev.memory import CHUNKS, FEW, WIDE

#: What the process that they start does takes long; that a step depends on no luck shows in its paths and layers.
pytestmark = pytest.mark.thorough

#: Bytes of what a layer passes on of one microbatch, and of what its W reads.
BORDER = 4 * FEW * WIDE
PAIR = 2 * BORDER

@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    return told("memory")


@pytest.fixture(scope="module")
def failing() -> dict[str, Any]:
    return told("failing")


def test_pinned_memory_has_been_read_when_the_call_returns(memory: dict[str, Any]) -> None:
    # Of what is given, the input and the target: begun without a wait, and ended when the call is.
    assert memory["pinned"] == {
        "inside, drop-in": [0, [], []], "inside, 1f1b": [1, [], []],
        "given, drop-in": [1, [], []], "given, 1f1b": [2, [], []],
        "given, by cuts, drop-in": [1, [], []], "given, by cuts, 1f1b": [2, [], []],
    }


def test_a_model_keeps_the_stream_object_that_it_was_given(memory: dict[str, Any]) -> None:
    assert memory["kept"] == [True, False]


def test_a_recording_has_times_and_memory(memory: dict[str, Any]) -> None:
    steps, makespan, most = memory["recorded"]
    assert steps == 2 and makespan > 0 and all(each > 0 for each in most)


def test_a_plan_knows_what_is_free(memory: dict[str, Any]) -> None:
    devices, may, free = memory["planned"]
    assert devices == ["sim:0", "sim:1"] and all(abs(one - 0.9 * all_) < 2**20 for one, all_ in zip(may, free))


@pytest.mark.parametrize("way", ["drop-in", "1f1b"])
@pytest.mark.parametrize("when", ["at once", "ahead"])
def test_weight_gradients_are_reserved_where_activations_are(way: str, when: str, memory: dict[str, Any]) -> None:
    # Beside plain autograd: what one W reads, and nothing like the gradients of all layers.
    split, fused = (memory["pools"][f"{way}, {backward}"][when] for backward in ("split", "autograd"))
    assert all(one <= other + PAIR for one, other in zip(split, fused))


def test_a_host_that_is_ahead_reserves_what_stages_pass_on_in_two_steps(memory: dict[str, Any]) -> None:
    # Of each microbatch, a value in one direction and its gradient in the other.
    most = 2 * CHUNKS * 2 * BORDER
    for way, found in memory["pools"].items():
        assert all(late - soon <= most for late, soon in zip(found["ahead"], found["at once"])), way


def test_an_allocation_that_fails_anywhere_reaches_the_caller_and_changes_nothing(failing: dict[str, Any]) -> None:
    assert len(failing) == 6 and all(found["failures"] > 50 for found in failing.values())
    assert {way: found["faults"] for way, found in failing.items() if found["faults"]} == {}
