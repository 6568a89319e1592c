"""A note on an exception: where in the pipeline it was raised."""
from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """``BaseException.add_note``, or what it does by hand on Python 3.10, which has no such method."""
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list):  # Else someone has put something else there, and the error matters more than the note.
        notes.append(text)
