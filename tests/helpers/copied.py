"""A log that stays the same one in copies of what holds it: layers are measured on copies."""
from __future__ import annotations

from typing import Any


class Log(list[Any]):
    """A list."""

    def __deepcopy__(self, memo: object) -> Log:
        return self
