"""A note on an exception: where in the pipeline it was raised."""
from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """``BaseException.add_note``, or what it does by hand on Python 3.10, which has no such method."""
    vars(error).setdefault("__notes__", []).append(text)
