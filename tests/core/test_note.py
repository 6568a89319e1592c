"""A note is added to whatever exception there is, and never hides it."""
from __future__ import annotations

import traceback
from dataclasses import dataclass

import pytest

from splitpipe.core.note import add_note


class Slotted(Exception):
    __slots__ = ("code",)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Stubborn(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"no {name}")


ERRORS = [ValueError("why"), KeyboardInterrupt(), SystemExit(3), Slotted(), Frozen(3), Stubborn()]


def notes(error: BaseException) -> object:
    return getattr(error, "__notes__", None)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_notes_are_kept_in_order_and_shown(error: BaseException) -> None:
    vars(error).pop("__notes__", None)
    add_note(error, "in layer '0'")
    add_note(error, "in stage 1")
    assert notes(error) == ["in layer '0'", "in stage 1"]
    try:
        raise error
    except BaseException as caught:
        text = "".join(traceback.format_exception(caught))
    if hasattr(BaseException, "add_note"):
        assert text.endswith("in layer '0'\nin stage 1\n")


def test_a_note_of_somebody_elses_stays() -> None:
    error = ValueError()
    vars(error)["__notes__"] = ["theirs"]
    add_note(error, "ours")
    assert notes(error) == ["theirs", "ours"]


@pytest.mark.parametrize("odd", [None, ("theirs",), "theirs", 3])
def test_notes_that_are_no_list_are_left_alone(odd: object) -> None:
    error = ValueError()
    vars(error)["__notes__"] = odd
    add_note(error, "ours")
    assert notes(error) == odd
