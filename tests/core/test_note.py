"""A note is added to whatever exception there is, and never hides it."""
from __future__ import annotations

import traceback

import pytest

from splitpipe.core.note import add_note


class Slotted(Exception):
    __slots__ = ("code",)


class Stubborn(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"no {name}")


@pytest.mark.parametrize("error", [ValueError("why"), KeyboardInterrupt(), Slotted(), Stubborn()], ids=repr)
def test_notes_are_kept_in_order_behind_those_of_others_and_shown(error: BaseException) -> None:
    vars(error)["__notes__"] = ["of others"]
    add_note(error, "in layer '0'")
    add_note(error, "in stage 1")
    assert getattr(error, "__notes__", None) == ["of others", "in layer '0'", "in stage 1"]
    if hasattr(BaseException, "add_note"):
        assert "".join(traceback.format_exception(error)).endswith("in layer '0'\nin stage 1\n")
