"""What runs by default: of each test few cases, which have the combinations that they are to have."""
from __future__ import annotations

from itertools import product
from typing import Any

from tests.helpers.covering import covering, essence, graded, pairs

AXES: dict[str, list[Any]] = {"letter": list("abcdefgh"), "number": [1, 2, 3], "flag": [True, False],
                              "way": [None, "x"]}


def has(cases: list[tuple[Any, ...]], *names: str) -> set[tuple[Any, ...]]:
    places = [list(AXES).index(name) for name in names]
    return {tuple(case[place] for place in places) for case in cases}


def test_every_two_values_of_two_axes_meet_but_those_that_are_not_allowed() -> None:
    cases = covering(AXES, pairs(list(AXES)), lambda letter, number, **_: (letter, number) != ("a", 1))
    for one, other in pairs(list(AXES)):
        left_out = {("a", 1)} if (one, other) == ("letter", "number") else set()
        assert has(cases, one, other) == {*product(AXES[one], AXES[other])} - left_out
    assert len(cases) <= 26  # 23 pairs of a letter and a number; the product has 92.


def test_what_the_essence_lacks_is_thorough() -> None:
    mark = graded(AXES, [["letter"]], pairs(list(AXES))).mark
    names, cases = mark.args
    assert names == tuple(AXES)
    assert [[each.name for each in case.marks] for case in cases[:9]] == [[]] * 8 + [["thorough"]]
    assert has([case.values for case in cases], "letter", "number") == {*product("abcdefgh", (1, 2, 3))}


def test_the_essence_of_a_test_has_each_value_of_each_parameter() -> None:
    cases = [dict(zip("xyz", values)) for values in product((1, 2, 3), "ab", (None,))]
    chosen = essence(cases)  # type: ignore[arg-type]
    assert len(chosen) == 3 and {value for at in chosen for value in cases[at].values()} == {1, 2, 3, "a", "b", None}
