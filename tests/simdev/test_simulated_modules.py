"""Modules with cuts on a simulated accelerator: where parameters live, what is refused, what a call leaves behind."""
from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulated import told
from tests.simdev.placed import FACTS

#: In the essence modules with cuts are among the paths between stages.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def wrong() -> dict[str, Any]:
    return told("placed")


@pytest.mark.parametrize("fact", [*FACTS])
def test_it_holds(fact: str, wrong: dict[str, Any]) -> None:
    assert wrong.get(fact) is None
