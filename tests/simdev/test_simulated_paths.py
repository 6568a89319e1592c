"""All paths between stages on a simulated accelerator: nothing depends on luck."""
from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.simulated import told
from tests.simdev.cases import CAST, PATHS


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    return told("paths")


@pytest.mark.parametrize("subject", [*PATHS, *CAST])
def test_no_work_depends_on_luck(subject: str, paths: dict[str, Any]) -> None:
    assert paths[subject]["cases"] >= 8 and paths[subject]["hazards"] == {}


@pytest.mark.parametrize("subject", [*PATHS, *CAST])
def test_every_case_trains_as_the_unwrapped_module(subject: str, paths: dict[str, Any]) -> None:
    assert paths[subject]["faults"] == []
