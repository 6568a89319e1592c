"""All paths between stages on a simulated accelerator: nothing depends on luck."""
from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ESSENCE
from tests.helpers.simulated import told
from tests.simdev.cases import CAST, PATHS


@pytest.fixture(scope="module")
def paths(request: pytest.FixtureRequest) -> dict[str, Any]:
    return told("few" if request.config.option.markexpr == ESSENCE else "paths")


@pytest.mark.parametrize("subject", [*PATHS, *(pytest.param(name, marks=pytest.mark.thorough) for name in CAST)])
def test_no_work_depends_on_luck_and_every_case_trains_as_the_unwrapped_module(
    subject: str, paths: dict[str, Any]
) -> None:
    found = paths[subject]
    assert found["cases"] >= 3 and (found["hazards"], found["faults"]) == ({}, [])
