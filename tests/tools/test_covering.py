"""What runs by default: of each test few cases, which have the combinations that they are to have."""
from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.covering import covering, graded, pairs
from tests.tools.covered import ROOT, environment

AXES: dict[str, list[Any]] = {
    "letter": list("abcdefgh"), "number": [1, 2, 3], "flag": [True, False], "way": [None, "x"]
}
TESTS = '''
import pytest

@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize("y", "ab")
def test_grid(x, y): pass

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("y", "ab")
def test_of_its_own(x, y): pass

@pytest.mark.thorough
def test_long(): pass

@pytest.fixture
def world(): pass

def test_of_two_processes(world): pass

def test_short(): pass
'''
CONFTEST = """
from tests.helpers import essence

def pytest_collection_modifyitems(items):
    essence.mark(items)
"""


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


@pytest.mark.thorough
def test_the_default_runs_each_value_of_each_parameter_once(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    words = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "setup.cfg"), "--rootdir"]
    ran = subprocess.run(
        [*words, str(tmp_path), str(tmp_path)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )
    assert "6 passed, 7 deselected" in ran.stdout, ran.stdout
