"""How much of the simulated device's cases a run has: few of them in the essence."""
from __future__ import annotations

import pytest

from tests.conftest import ESSENCE


@pytest.fixture(scope="session")
def few(request: pytest.FixtureRequest) -> list[str]:
    """Arguments of its command."""
    return ["--few"] if request.config.option.markexpr == ESSENCE else []
