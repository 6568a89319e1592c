"""All paths between stages on a simulated accelerator: nothing depends on luck."""
from __future__ import annotations

from typing import Any

import pytest

from tests.simulated import told


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    return told("paths")


def test_no_work_on_any_path_depends_on_luck(paths: dict[str, Any]) -> None:
    assert paths["cases"] > 700 and paths["hazards"] == {}


def test_every_path_trains_as_the_unwrapped_module(paths: dict[str, Any]) -> None:
    assert paths["faults"] == []
