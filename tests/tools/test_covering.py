"""Selections of a grid: they have what they are to have, and are far smaller than the grid."""
from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.helpers.covering import covering, graded, pairs

AXES: dict[str, list[Any]] = {
    "letter": list("abcdefgh"), "number": [1, 2, 3], "flag": [True, False], "way": [None, "x"]
}


def has(cases: list[tuple[Any, ...]], *names: str) -> set[tuple[Any, ...]]:
    places = [list(AXES).index(name) for name in names]
    return {tuple(case[place] for place in places) for case in cases}


def test_every_two_values_of_two_axes_meet() -> None:
    cases = covering(AXES, pairs(list(AXES)))
    for one, other in pairs(list(AXES)):
        assert has(cases, one, other) == {*product(AXES[one], AXES[other])}
    assert len(cases) == len({*cases}) <= 26  # 24 pairs of a letter and a number; the product has 96.


def test_a_selection_is_the_same_in_every_process() -> None:
    axes = {"letter": ["a", "b", "c"], "flag": [True, False], "way": [None, "x"]}
    assert covering(axes, pairs(list(axes))) == [
        ("a", True, "x"), ("c", True, None), ("a", False, None), ("b", False, "x"), ("b", True, None), ("c", False, "x")
    ]


def test_cases_that_there_are_not_are_left_out() -> None:
    def allowed(letter: str, number: int, **_: Any) -> bool:
        return letter != "h" and (letter, number) != ("a", 1)

    cases = covering(AXES, pairs(list(AXES)), allowed)
    assert has(cases, "letter", "number") == {*product("abcdefg", (1, 2, 3))} - {("a", 1)}
    assert has(cases, "letter", "way") == {*product("abcdefg", (None, "x"))}


def test_what_the_essence_lacks_is_thorough() -> None:
    mark = graded(AXES, [["letter"]], pairs(list(AXES))).mark
    names, cases = mark.args
    assert names == tuple(AXES)
    assert [[each.name for each in case.marks] for case in cases[:9]] == [[]] * 8 + [["thorough"]]
    assert has([case.values for case in cases], "letter", "number") == {*product("abcdefgh", (1, 2, 3))}
    assert mark.name == pytest.mark.parametrize.name
