"""Searches for the best schedule for given costs, with a limit on memory."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal

from splitpipe.schedule.construct.library import SCHEDULES, build, variants, verify_size
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import Schedule, listed
from splitpipe.schedule.plurals import counted
from splitpipe.schedule.search.period import Period
from splitpipe.schedule.search.steady import periods
from splitpipe.schedule.search.tighten import tightened
from splitpipe.schedule.search.word import Problem, Word, length, peak, schedule_of, words_of

_PACE = 10_000_000  # Roughly the number of ops that are looked at per second.
_KEPT = 2  # Periods in the middle of each device that stay fixed while both ends are tightened.

#: Span, words and problem.
Found = tuple[float, list[Word], Problem]


def search(
    devices: int,
    chunks: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    stages_per_device: int | None = None,
    seconds: float = 5.0,
    span: Literal["makespan", "longest"] = "makespan",
) -> Schedule:
    """Returns the shortest schedule that it finds, with a limit on memory.

    First it searches for a steady state: what each device repeats, in the order and with the lags that make the period
    of one, two or three microbatches shortest. Then it tightens the beginning and the end. It also starts from the
    named schedules, so its result is never longer than any of these that fits. The first step is from "Pipeline
    Parallelism with Controllable Memory" (arXiv 2405.15362, section 3), with real times instead of equal slots.

    Args:
        devices: number of devices, at least 1.
        chunks: number of microbatches, at least 1.
        costs: of the ops, in any unit. Default: F, B and W take 1, and copies take no time.
        memory: the number of microbatches whose activations, on all stages of a device, may be alive there at once; a
            number, or one per device. Default: all.
        stages_per_device: 1; 2, with V or loop placement; or more, with loop placement. Default: as many as the costs
            are for, or else the better of 1 and 2.
        seconds: how long to search, roughly, on one core, for each of the two numbers of stages. Building and rating
            the named schedules takes additional time, which is longer for many thousands of ops. Work is counted rather
            than time: the same arguments give the same schedule.
        span: what to minimise: ``"makespan"``, or ``"longest"``, the longest span of a device, for devices that needn't
            wait for each other between steps.

    Raises:
        TypeError: ``costs`` isn't a Costs.
        ValueError: a number is invalid, the costs are for another number of stages, nothing fits into the memory, or
            the costs have a time per hop, or recompute.

    Example:
        >>> from splitpipe import schedule
        >>> timeline = schedule.simulate(search(4, 8, memory=3, stages_per_device=2, seconds=0.5))
        >>> timeline.makespan, schedule.simulate(schedule.build("1f1b", 4, 8)).makespan
        (26.5, 33.0)
    """
    for what, value in {"devices": devices, "chunks": chunks, "stages_per_device": stages_per_device}.items():
        if (value is not None or what != "stages_per_device") and (type(value) is not int or value < 1):
            raise ValueError(f"{what}={value!r}: expected a whole number of at least 1.")
    verify_size(devices, chunks, stages_per_device or 1)
    if not 0 <= real(seconds) < math.inf:
        raise ValueError(f"seconds={seconds!r}: expected a number, finite and not negative.")
    if not isinstance(span, str) or span not in ("makespan", "longest"):
        raise ValueError(f"span={span!r}: expected 'makespan' or 'longest'.")
    costs = Costs() if costs is None else costs
    verify_costs(costs)
    if any(listed(costs.recompute) or [costs.recompute]):
        raise ValueError(
            f"recompute={costs.recompute!r}: expected 0, since the search can't model the time for which an op runs "
            "before it waits for its gradient. Add it to backward_input instead."
        )
    cap = _caps(memory, devices, chunks)
    places = {place: None for v in _counts(costs, devices, stages_per_device) for place in _placements(devices, v)}
    problems = [_problem(place, chunks, costs, cap, span == "longest") for place in places]
    named = list(_named(problems, cap))
    _, words, problem = min(_searched(problems, named, seconds), key=itemgetter(0))
    return schedule_of(problem, words, "search")


def _caps(memory: float | Sequence[float] | None, devices: int, chunks: int) -> list[float]:
    several = listed(memory)
    given = [chunks if memory is None else memory] * devices if several is None else several
    if len(given) != devices:
        raise ValueError(
            f"memory={memory!r} has {counted(len(given), 'number')}: expected one for each of "
            f"{counted(devices, 'device')}."
        )
    for number in given:
        if math.isnan(real(number)):
            raise ValueError(f"memory={memory!r}: expected a number of at least 1, or one for each device.")
        if not real(number) >= 1 - 1e-9:
            raise ValueError(
                f"memory={memory!r}: nothing fits, since all activations of a microbatch are alive when its backward "
                "begins. Expected at least 1 for each device."
            )
    return [min(real(number), chunks) for number in given]


def _counts(costs: Costs, devices: int, stages_per_device: int | None) -> list[int]:
    """The possible numbers of stages per device."""
    if stages_per_device is not None:
        return [stages_per_device]
    for each in (costs.forward, costs.backward_input, costs.backward_weight):
        if not isinstance(each, (int, float)):
            if not each or len(each) % devices:
                raise ValueError(
                    f"the costs are for {counted(len(each), 'stage')}: expected the same number of stages on each of "
                    f"{counted(devices, 'device')}."
                )
            return [len(each) // devices]
    return [1, 2]


def _placements(devices: int, v: int) -> Iterator[tuple[int, ...]]:
    if v == 2:
        yield (*range(devices), *reversed(range(devices)))
    yield tuple(device for _ in range(v) for device in range(devices))


def _problem(placement: tuple[int, ...], chunks: int, costs: Costs, cap: Sequence[float], longest: bool) -> Problem:
    v = len(placement) // len(cap)
    return Problem(placement, chunks, costs, tuple(int(number * v + 1e-9) for number in cap), longest)


def _named(problems: Sequence[Problem], cap: Sequence[float]) -> Iterator[Found]:
    """The named schedules that fit."""
    devices, chunks, costs = problems[0].devices, problems[0].chunks, problems[0].costs
    counts = {len(problem.placement) // devices for problem in problems}
    for name in SCHEDULES:
        for options in variants(name, devices, sorted(counts)):
            try:
                stages = build(name, devices, 1, **options).stages  # This is fast.
                if stages % devices or stages // devices not in counts:
                    continue
                schedule = build(name, devices, chunks, **options)
            except ValueError:
                continue  # The schedule doesn't support these numbers.
            problem = _problem(schedule.placement, chunks, costs, cap, problems[0].longest)
            words = words_of(schedule)
            if all(peak(word) <= most for word, most in zip(words, problem.caps)):
                yield length(problem, words), words, problem


def _searched(problems: Sequence[Problem], named: Sequence[Found], seconds: float) -> list[Found]:
    """Schedules from periods and from named schedules; the best is no longer than any of the latter."""
    work = int(seconds * _PACE)
    rated = [
        (value, period, problem)
        for problem in problems
        for value, period in periods(problem, work * 4 // 10 // len(problems))
    ]
    rated = sorted(rated, key=itemgetter(0))[:4]
    work = work * 6 // 10
    found: list[Found] = []
    for seed, (_, period, problem) in enumerate(rated):
        found.append((*finished(problem, period, work // (2 * len(rated)), seed, problem.goal), problem))
    _, words, problem = min([*found, *named], key=itemgetter(0))
    return [*found, (*tightened(problem, words, work // 2, 0, problem.goal), problem)]


def finished(problem: Problem, period: Period, work: int, seed: int, goal: float = 0.0) -> tuple[float, list[Word]]:
    """The span and words of a whole schedule: a short one with tight ends, and whole periods in its middle."""
    whole = period.unrolled(problem.chunks)
    lead = max(each.start for each in period.full(problem.chunks))
    free = problem.devices // period.size + 1  # Full periods at each end that may change.
    chunks = (lead + _KEPT + 2 * free) * period.size + problem.chunks % period.size
    if chunks >= problem.chunks:
        return tightened(problem, whole, work, seed, goal)
    short = replace(problem, chunks=chunks)
    words, fixed = [], []
    for row, full in zip(period.rows, period.full(chunks)):
        parts = period.parts(row, chunks)
        first = full.start + (len(full) - _KEPT) // 2
        start = sum(map(len, parts[:first]))
        words.append([letter for part in parts for letter in part])
        fixed.append(range(start, start + _KEPT * len(row)))
    _, tight = tightened(short, words, work, seed, fixed=fixed)
    more = (problem.chunks - chunks) // period.size
    spliced = [
        word[: kept.start] + list(row) * more + word[kept.start :] for word, kept, row in zip(tight, fixed, period.rows)
    ]
    return min(((length(problem, words), words) for words in (whole, spliced)), key=itemgetter(0))
