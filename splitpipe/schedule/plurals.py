"""Numbers in messages."""
from __future__ import annotations


def counted(number: int, what: str) -> str:
    """A number with its noun: 1 stage, 2 stages, 3 microbatches."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"
