"""Every allocation of a step fails once: the caller is told, and nothing is half changed."""
from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.devices.failing import ways
from tests.tools.covered import ROOT, environment

pytestmark = [pytest.mark.cuda, pytest.mark.devices(2), pytest.mark.fake, pytest.mark.thorough]


@pytest.fixture(scope="module")
def failing() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.devices.failing"], cwd=ROOT, capture_output=True, text=True,
        env=environment(), check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", ways())
def test_an_allocation_that_fails_anywhere_reaches_the_caller_and_changes_nothing(
    way: str, failing: dict[str, Any]
) -> None:
    assert failing[way]["failures"] > 50 and failing[way]["faults"] == {}
