"""What is run by default: each test, and of those with parameters each value of each."""
from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.essence import essence
from tests.tools.covered import environment

ROOT = Path(__file__).resolve().parents[2]
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


def test_every_value_of_every_parameter_is_had_by_few_cases() -> None:
    cases = [dict(zip("xyz", case)) for case in product([1, 2, 3], "ab", [None, True])]
    found = essence(cases)
    assert len(found) == 3
    for name in "xyz":
        assert {case[name] for case in cases} == {cases[number][name] for number in found}


@pytest.mark.thorough
def test_the_default_runs_the_essence(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    words = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "setup.cfg"), "--rootdir"]
    ran = subprocess.run(
        [*words, str(tmp_path), str(tmp_path)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )
    assert "6 passed, 7 deselected" in ran.stdout, ran.stdout
