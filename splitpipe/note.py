"""A note on an exception: where in the pipeline it was raised."""
from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """``BaseException.add_note``, and the same attribute by hand on Python 3.10, which has no such method."""
    notes: list[str] = [*getattr(error, "__notes__", ()), text]
    try:
        error.__notes__ = notes
    except AttributeError:  # An exception class with __slots__ takes no notes; it is raised as it is.
        return
