"""Modulo scheduling with OR-Tools' CP-SAT: the shortest period that fits into memory, by exact search.

Each op starts at ``origin of its device + r + q * interval``. The r lie in [0, interval), where no two ops of a device
run at once, so each period looks the same. A need is a linear constraint, and how many activations are alive follows
from the q, and from which r is less than which. The model's size does not depend on the number of microbatches. (For
loops of instructions: Eichenberger and Davidson, "Efficient Formulation for Optimal Modulo Schedulers", 1997.)
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from itertools import product
from typing import Any

from splitpipe.schedule.search.period import Period
from splitpipe.schedule.search.word import F, Problem, W

_FINEST = 400  # Units of time in an op, at most, more or less.


def solver(wanted: bool | None) -> Any:
    """OR-Tools' module for CP-SAT; None if it is not wanted, or not there while that is left open.

    Raises:
        ImportError: it is wanted, and not there.
    """
    if wanted is False:
        return None
    try:
        return import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        if wanted is None:
            return None
        raise ImportError(
            "exact=True needs OR-Tools, which is not installed: pip install splitpipe[search], or leave exact=None."
        ) from error


def shorter(cp_model: Any, problem: Problem, size: int, below: float, seconds: float) -> tuple[float, Period] | None:
    """The shortest period that it finds, and how long it is, a microbatch; None if it finds none.

    Args:
        cp_model: OR-Tools' module.
        problem: to solve.
        size: microbatches of the period.
        below: lengths to look at, a microbatch: shorter ones only.
        seconds: of deterministic time, OR-Tools' measure of work, for all that it tries.
    """
    unit = _unit(problem) / (2 if size == 1 else 1)
    low = max(1, math.ceil(problem.work * size / unit - 1e-6))
    high = math.ceil(below * size / unit - 1e-6) - 1
    best: tuple[float, Period] | None = None
    tries = max(1, high - low + 1).bit_length()
    while low <= high:
        interval = (low + high) // 2
        period = _Model(cp_model, problem, size, interval, unit).solved(seconds / tries)
        if period is None:
            low = interval + 1
        else:
            best = interval * unit / size, period
            high = interval - 1
    return best


def _unit(problem: Problem) -> float:
    """A time of which all others are multiples, or nearly so."""
    times = [time for time in (*problem.times, problem.costs.hop) if time]
    fractions = [Fraction(time).limit_denominator(10_000) for time in times]
    if any(abs(fraction - time) > 1e-9 * time for fraction, time in zip(map(float, fractions), times)):
        return problem.pace / _FINEST
    bottom = math.lcm(*(fraction.denominator for fraction in fractions))
    exact = math.gcd(*(int(fraction * bottom) for fraction in fractions)) / bottom
    return max(exact, problem.pace / _FINEST)


@dataclass(frozen=True)
class _Start:
    """When an op starts: r in the period, q periods later."""

    r: Any
    q: Any
    time: Any


class _Model:
    """A period of given length, as constraints.

    Args:
        cp_model: OR-Tools' module.
        problem: to solve.
        size: microbatches of a period.
        interval: its length, in units.
        unit: of time.
    """

    def __init__(self, cp_model: Any, problem: Problem, size: int, interval: int, unit: float) -> None:
        self.cp_model, self.problem, self.size, self.interval = cp_model, problem, size, interval
        self.model = cp_model.CpModel()
        self.times = [math.ceil(time / unit - 1e-6) for time in problem.times]
        self.copy = math.ceil(problem.costs.hop / unit - 1e-6)
        self.origins = [self.model.new_int_var(0, interval - 1, f"origin {d}") for d in range(problem.devices)]
        self.latest = 2 * len(problem.place) + 2
        self.starts: dict[tuple[int, int], _Start] = {}
        for letter, k in product(range(len(problem.place)), range(size)):
            self._add(letter, k)
        for letters in problem.letters:
            self._one_at_a_time(letters)
        for letter, k in self.starts:
            self._in_order(letter, k)
        for device, letters in enumerate(problem.letters):
            self._memory(letters, problem.caps[device])

    def _add(self, letter: int, k: int) -> None:
        device = self.problem.place[letter]
        room = self.interval - self.times[letter]
        first = k == 0 and letter == self.problem.letters[device][0]  # Where the device's period starts.
        r = self.model.new_int_var(0, 0 if first else room, f"r {letter} {k}")
        q = self.model.new_int_var(0, self.latest, f"q {letter} {k}")
        self.starts[letter, k] = _Start(r, q, self.origins[device] + r + self.interval * q)

    def _one_at_a_time(self, letters: Sequence[int]) -> None:
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(self.starts[letter, k].r, self.times[letter], f"run {letter} {k}")
            for letter, k in product(letters, range(self.size))
        )

    def _in_order(self, letter: int, k: int) -> None:
        """After what it needs, and after the microbatch before."""
        own, place = self.starts[letter, k].time, self.problem.place
        for need in self.problem.needs[letter]:
            hop = self.copy if place[need] != place[letter] else 0
            self.model.add(own >= self.starts[need, k].time + self.times[need] + hop)
        if k:
            self.model.add(own >= self.starts[letter, k - 1].time + self.times[letter])
        elif self.size > 1:
            last = self.starts[letter, self.size - 1].time
            self.model.add(own + self.interval >= last + self.times[letter])

    def _memory(self, letters: Sequence[int], cap: int) -> None:
        """When an F starts, of each stage those are alive whose F came and whose W did not."""
        forwards = [(letter, k) for letter, k in product(letters, range(self.size)) if letter % 3 == F]
        for one in forwards:
            alive = 0
            for other in forwards:
                released = other[0] + W, other[1]
                alive += self.starts[released].q - self.starts[other].q + self._before(one, released)
                alive -= self._before(one, other) if one != other else 0
            self.model.add(alive <= cap)

    def _before(self, one: tuple[int, int], other: tuple[int, int]) -> Any:
        """Whether, within the period, one comes before the other."""
        less = self.model.new_bool_var(f"{one} before {other}")
        r, s = self.starts[one].r, self.starts[other].r
        self.model.add(r + self.times[one[0]] <= s).only_enforce_if(less)
        self.model.add(s + self.times[other[0]] <= r).only_enforce_if(~less)
        return less

    def solved(self, seconds: float) -> Period | None:
        """A period; None if there is none, or none was found."""
        solver = self.cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False  # It would not give the handler back.
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2 if self.size == 1 else 0  # What is faster differs.
        solver.parameters.max_deterministic_time = seconds
        status = solver.solve(self.model)
        if status not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return None
        found = {key: (solver.value(start.q), solver.value(start.r)) for key, start in self.starts.items()}
        lags = [0] * len(self.problem.place)
        rows = []
        for letters in self.problem.letters:
            ops = [
                (found[letter, k][1], found[letter, k][1] + self.times[letter], rank, letter)
                for rank, letter in enumerate(self.problem.chain)
                if letter in letters
                for k in range(self.size)
            ]
            rows.append(tuple(letter for *_, letter in sorted(ops)))
            for letter in letters:  # Microbatch k of it comes q periods later.
                lags[letter] = sum(found[letter, k][0] for k in range(self.size))
            least = min(lags[letter] for letter in letters)
            for letter in letters:
                lags[letter] -= least
        return Period(tuple(rows), tuple(lags), self.size)
