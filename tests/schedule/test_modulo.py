"""The exact search for periods, with OR-Tools; and the search without it."""
from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from splitpipe.schedule import Costs, search, simulate
from splitpipe.schedule.search.modulo import shorter, solver
from splitpipe.schedule.search.period import Period, fits, played
from splitpipe.schedule.search.splice import finished
from splitpipe.schedule.search.word import Problem, schedule_of

REAL = Costs(forward=3, backward_input=4, backward_weight=2)


@pytest.fixture(scope="module")
def cp_model() -> Any:
    return pytest.importorskip("ortools.sat.python.cp_model", reason="the exact search needs OR-Tools")


def v_problem(devices: int, chunks: int, cap: int, costs: Costs = REAL) -> Problem:
    """Two stages a device, on a V."""
    return Problem((*range(devices), *reversed(range(devices))), chunks, costs, (cap,) * devices)


def length(problem: Problem, period: Period) -> float:
    """Of a period, a microbatch."""
    return played(problem, period.rows, period.lags, period.size)[1]


def test_the_period_with_the_memory_of_v_min_is_ten_and_a_half(cp_model: Any) -> None:
    problem = v_problem(4, 64, 4)
    found = shorter(cp_model, problem, 1, below=11, seconds=10)
    assert found is not None
    interval, period = found
    assert interval == 10.5 == length(problem, period)
    assert fits(problem, period)
    span, words = finished(problem, period, 100_000, seed=0)
    timeline = simulate(schedule_of(problem, words), REAL)
    assert timeline.makespan == span <= 690.5
    assert max(timeline.peak_activations) <= 2


def test_no_period_is_shorter_than_the_work(cp_model: Any) -> None:
    assert shorter(cp_model, v_problem(2, 8, 16), 1, below=9, seconds=1) is None
    found = shorter(cp_model, v_problem(2, 8, 16), 1, below=9.3, seconds=1)
    assert found is not None and found[0] == 9


def test_a_period_of_two_microbatches_can_be_shorter_than_any_of_one(cp_model: Any) -> None:
    problem = Problem((0, 1, 2, 3), 20, Costs(), (3, 3, 3, 3))
    one = shorter(cp_model, problem, 1, below=20, seconds=2)
    assert one is not None
    assert shorter(cp_model, problem, 1, below=one[0], seconds=2) is None
    two = shorter(cp_model, problem, 2, below=one[0], seconds=2)
    assert two is not None and fits(problem, two[1])
    assert length(problem, two[1]) <= two[0] < one[0]


def test_times_on_no_common_grid_are_rounded_up(cp_model: Any) -> None:
    costs = Costs(1 / 3, 2**0.5, 0.1, copy=0.0123)
    problem = Problem((0, 1), 20, costs, (3, 3))
    found = shorter(cp_model, problem, 1, below=5, seconds=2)
    assert found is not None and fits(problem, found[1])
    assert problem.work <= length(problem, found[1]) <= found[0] * (1 + 1e-9)
    assert found[0] <= 1.02 * problem.work


@pytest.mark.parametrize("costs", [Costs(1, 1, 0), Costs(0, 0, 0), Costs([1, 2, 1, 1, 1, 3], 1, 1, copy=0.5)])
def test_any_costs_give_a_schedule_that_fits(cp_model: Any, costs: Costs) -> None:
    timeline = simulate(search(3, 6, costs, 2, 2, exact=True, seconds=0.2), costs)
    assert max(timeline.peak_activations) <= 2


@pytest.mark.parametrize("memory", [2, 2.5])
def test_exact_is_not_longer_than_pure_python(cp_model: Any, memory: float) -> None:
    plain, exact = (simulate(search(4, 16, REAL, memory, 2, each, seconds=0.4), REAL) for each in (False, True))
    assert exact.makespan <= plain.makespan
    assert max(exact.peak_activations) <= memory


def test_exact_gives_the_same_again(cp_model: Any) -> None:
    one, other = (search(3, 8, REAL, 2, 2, exact=True, seconds=0.5) for _ in range(2))
    assert one == other


@pytest.fixture
def no_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in its place is how Python says that a module is not there."""
    for name in ("ortools", "ortools.sat.python.cp_model"):
        monkeypatch.setitem(sys.modules, name, None)


def test_exact_without_ortools_says_what_to_install(no_ortools: None) -> None:
    with pytest.raises(ImportError, match=r"pip install splitpipe\[search\]"):
        search(2, 4, exact=True)


def test_without_ortools_the_search_is_that_in_pure_python(no_ortools: None) -> None:
    assert solver(None) is None
    assert search(2, 4, REAL, 1, seconds=0.05) == search(2, 4, REAL, 1, exact=False, seconds=0.05)


def test_an_interrupt_after_a_search_is_pythons_as_before(cp_model: Any) -> None:
    # OR-Tools would leave the system's own handler behind, which ends the process.
    script = """
import os, signal
from splitpipe.schedule import Costs
from splitpipe.schedule.searching.modulo import shorter, solver
from splitpipe.schedule.searching.word import Problem
assert shorter(solver(True), Problem((0, 1, 1, 0), 8, Costs(3, 4, 2), (4, 4)), 1, 30.0, 1.0)
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
