"""Memory on a simulated accelerator: what is read after a call, what is counted, and allocations that fail."""
from __future__ import annotations

from typing import Any

import pytest

from tests.simulated import told


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    return told("memory")


def test_pinned_memory_has_been_read_when_the_call_returns(memory: dict[str, Any]) -> None:
    assert memory["unwaited"] == {"drop-in": [], "1f1b": []}


def test_a_recording_has_times_and_memory(memory: dict[str, Any]) -> None:
    steps, makespan, most = memory["recorded"]
    assert steps == 2 and makespan > 0 and all(each > 0 for each in most)


def test_a_plan_knows_what_is_free(memory: dict[str, Any]) -> None:
    devices, may, free = memory["planned"]
    assert devices == ["sim:0", "sim:1"] and all(abs(one - 0.9 * all_) < 2**20 for one, all_ in zip(may, free))
