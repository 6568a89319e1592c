"""Random forwards by cuts over simulated devices. More: ``python -m tests.simdev forwards --count 2000 --seed 1``."""
from __future__ import annotations

import pytest

from tests.helpers.simulated import told

pytestmark = pytest.mark.thorough


def test_random_forwards_on_several_devices_are_their_modules() -> None:
    assert told("forwards")["wrong"] == []
