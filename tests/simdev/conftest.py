"""What simulated devices find on paths and in layers: few cases in the essence, of one process."""
from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ESSENCE
from tests.helpers.simulated import told


@pytest.fixture(scope="session")
def few(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """The essence's findings; None where all is run."""
    return told("few") if request.config.option.markexpr == ESSENCE else None
