"""For ``pytest -p``, under torch's sanitizer: a recomputation that stops early raises what its hooks trip over."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.checkpoint import set_checkpoint_early_stop


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """Recomputations run to their end."""
    with set_checkpoint_early_stop(False):
        yield
