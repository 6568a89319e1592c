"""Searches for the best schedule for given costs, under a cap on memory."""
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

_PACE = 10_000_000  # Ops that are looked at in a second, more or less.
_KEPT = 2  # Periods in the middle that stay as they are, on each device, while both ends are tightened.

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
    """The shortest schedule that it finds, under a cap on memory.

    First it looks for a steady part: what each device does over and over, in the order and with the lags that give the
    shortest period, of one, two or three microbatches. Then it tightens the beginning and the end. It also starts from
    the schedules with a name, so it never gives a longer one than any that fits. The first step is from "Pipeline
    Parallelism with Controllable Memory" (arXiv 2405.15362, section 3), with real times in place of equal slots.

    Args:
        devices: number of them, at least 1.
        chunks: number of microbatches, at least 1.
        costs: of the ops, in any unit; None: F, B and W take 1, copies nothing.
        memory: how many microbatches' activations, of a device's whole share, may be alive on it at once; a number, or
            one for each device. None: all.
        stages_per_device: 1; 2, on a V or a loop; or more, on a loop. None: what the costs are for, or the better of 1
            and 2.
        seconds: how hard to look: about so long on one core, for each of the two, and besides what it takes to build
            the schedules with a name and to rate them once, which for many thousands of ops is longer. It counts work,
            not time: the same arguments give the same schedule.
        span: what is to be short: the makespan, or the longest span of a device, where a device needn't wait for the
            others between steps.

    Raises:
        TypeError: the costs are none.
        ValueError: a number makes no sense, the costs are for another number of stages, or nothing runs under the cap;
            the costs have a time for each hop, or recompute.

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
        raise ValueError(f"seconds={seconds!r}: expected a number, not negative and finite.")
    if not isinstance(span, str) or span not in ("makespan", "longest"):
        raise ValueError(f"span={span!r}: expected 'makespan' or 'longest'.")
    costs = Costs() if costs is None else costs
    verify_costs(costs)
    if any(listed(costs.recompute) or [costs.recompute]):
        raise ValueError(
            f"recompute={costs.recompute!r}: expected 0, since the search has no time before an op waits for what it "
            "needs. Add it to backward_input, which it comes before."
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
                f"memory={memory!r}: nothing runs, since when a microbatch turns, all its activations are alive. "
                "Expected at least 1 for each device."
            )
    return [min(real(number), chunks) for number in given]


def _counts(costs: Costs, devices: int, stages_per_device: int | None) -> list[int]:
    """The numbers of stages that a device may have."""
    if stages_per_device is not None:
        return [stages_per_device]
    for each in (costs.forward, costs.backward_input, costs.backward_weight):
        if not isinstance(each, (int, float)):
            if not each or len(each) % devices:
                raise ValueError(
                    f"the costs are for {counted(len(each), 'stage')}: expected as many on each of "
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
    """The schedules with a name that fit."""
    devices, chunks, costs = problems[0].devices, problems[0].chunks, problems[0].costs
    counts = {len(problem.placement) // devices for problem in problems}
    for name in SCHEDULES:
        for options in variants(name, devices, sorted(counts)):
            try:
                stages = build(name, devices, 1, **options).stages  # Quickly found.
                if stages % devices or stages // devices not in counts:
                    continue
                schedule = build(name, devices, chunks, **options)
            except ValueError:
                continue  # Its own rule does not allow these numbers.
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
    """The span and words of a whole schedule: a short one with tight ends, with whole periods put into its middle."""
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
