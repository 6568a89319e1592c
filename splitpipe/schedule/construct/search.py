"""Searches for the best schedule for given costs, with a limit on memory."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from random import Random
from typing import Literal

from splitpipe.schedule.construct.anneal import Graph, improve
from splitpipe.schedule.construct.library import SCHEDULES, build, variants, verify_numbers
from splitpipe.schedule.construct.problem import Problem, W, Word, lengthen, schedule_of, shorten, words_of
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import Schedule, counted, listed

_PACE = 10_000_000  # Roughly the number of ops that are looked at per second.
_SLACK = 1e-9  # As a fraction of an interval; rounding errors are smaller.

#: Span, words and problem.
Found = tuple[float, list[Word], Problem]


def search(
    devices: int, chunks: int, costs: Costs | None = None, memory: float | Sequence[float] | None = None,
    stages_per_device: int | None = None, seconds: float = 5.0, span: Literal["makespan", "longest"] = "makespan",
) -> Schedule:
    """Returns the shortest schedule that it finds, with a limit on memory.

    First it searches for a steady state: what each device repeats, in the order and with the lags that make the period
    of one, two or three microbatches shortest. Then it shortens the whole. It also starts from the named schedules, so
    its result is never longer than any of these that fits. The first step is from "Pipeline Parallelism with
    Controllable Memory" (arXiv 2405.15362, section 3), with real times instead of equal slots.

    Args:
        devices: number of devices, at least 1.
        chunks: number of microbatches, at least 1.
        costs: of the ops, in any unit. Default: F, B and W take 1, and copies take no time.
        memory: the number of microbatches whose activations, on all stages of a device, may be alive there at once; a
            number, or one per device. Default: all.
        stages_per_device: 1; 2, with V or loop placement; or more, with loop placement. Default: as many as the costs
            are for, or else the better of 1 and 2.
        seconds: roughly how long to search on one core; twice as long if both 1 and 2 stages per device are tried.
            Building and rating the named schedules takes additional time, which is longer for many thousands of ops.
            Work is counted rather than time: the same arguments give the same schedule.
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
    verify_numbers(devices, chunks, 1 if stages_per_device is None else stages_per_device)
    if not 0 <= real(seconds) < math.inf:
        raise ValueError(f"seconds={seconds!r}: expected a number, finite and not negative.")
    if not isinstance(span, str) or span not in ("makespan", "longest"):
        raise ValueError(f"span={span!r}: expected 'makespan' or 'longest'.")
    costs = Costs() if costs is None else costs
    verify_costs(costs)
    if any(listed(costs.recompute) or [costs.recompute]):
        raise ValueError(f"recompute={costs.recompute!r}: expected 0 in a search. Add it to backward_input instead.")
    cap = _caps(memory, devices, chunks)
    places = {place: None for v in _counts(costs, devices, stages_per_device) for place in _placements(devices, v)}
    problems = [_problem(place, chunks, costs, cap, span == "longest") for place in places]
    _, words, problem = _best(problems, list(_named(problems, cap)), int(seconds * _PACE))
    return schedule_of(problem, words, "search")


def _caps(memory: float | Sequence[float] | None, devices: int, chunks: int) -> list[float]:
    several = listed(memory)
    caps = [chunks if memory is None else memory] * devices if several is None else several
    if len(caps) != devices:
        raise ValueError(f"memory={memory!r}: expected a number, or one for each of {counted(devices, 'device')}.")
    if not all(real(number) >= 1 - 1e-9 for number in caps):
        raise ValueError(f"memory={memory!r}: expected at least 1, as backward begins with a microbatch's activations.")
    return [min(real(number), chunks) for number in caps]


def _counts(costs: Costs, devices: int, stages_per_device: int | None) -> list[int]:
    if stages_per_device is not None:
        return [stages_per_device]
    for each in (costs.forward, costs.backward_input, costs.backward_weight):
        if not isinstance(each, (int, float)):
            if not each or len(each) % devices:
                stages = counted(len(each), "stage")
                raise ValueError(f"the costs are for {stages}: expected the same number on each of {devices} devices.")
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
    devices, chunks, costs = problems[0].devices, problems[0].chunks, problems[0].costs
    counts = {len(problem.placement) // devices for problem in problems}
    for name in SCHEDULES:
        for options, one in variants(name, devices, 1, sorted(counts)):  # This is fast.
            if one.stages % devices or one.stages // devices not in counts:
                continue
            try:
                schedule = build(name, devices, chunks, **options)
            except ValueError:
                continue  # They are too many ops.
            problem = _problem(schedule.placement, chunks, costs, cap, problems[0].longest)
            words = words_of(schedule)
            if problem.fits(words):
                yield Graph(problem, words).span, words, problem


def _best(problems: Sequence[Problem], named: Sequence[Found], work: int) -> Found:
    """The shortest schedule of those from periods and the named ones, improved."""
    share = work // (2 * len(problems))
    rated = sorted([(*each, problem) for problem in problems for each in _periods(problem, share)], key=itemgetter(0))
    candidates = [
        (*improve(problem, words, work // (4 * len(rated[:2])), seed, goal=problem.goal), problem)
        for seed, (_, words, problem) in enumerate(rated[:2]) if problem.fits(words)
    ]
    span, words, problem = min([*candidates, *named], key=itemgetter(0))
    for seed in range(2):
        span, words = improve(problem, words, work // 8, seed, heat=0.2, goal=problem.goal)
    return span, words, problem


def _periods(problem: Problem, work: int) -> list[tuple[float, list[Word]]]:
    """The spans and words of schedules that repeat a period, which is shortened with fewer microbatches."""
    short, more = shorten(problem, 1)
    tries = max(1, min(30, work // (20 * short.chunks * len(problem.device_of))))
    starts = sorted(((Graph(short, x, 1, more).span, x) for x in _blocks(short, tries)), key=itemgetter(0))
    candidates = [
        improve(short, words, work // 10, seed, heat * problem.chunks, size=1, more=more)
        for seed, ((_, words), heat) in enumerate(zip(starts, (0.03, 0.1, 0.1)))
    ]
    # Periods of two and three microbatches, from the best of one.
    _, best = min(candidates, key=itemgetter(0))
    found = [(span, lengthen(problem, words, more, size=1)) for span, words in candidates]
    for size in (2, 3):
        if 2 * size <= problem.chunks:
            several, more = shorten(problem, size)
            words = lengthen(several, best, several.chunks - short.chunks, size=1)
            span, words = improve(several, words, work * 7 // 20, 0, 0.02 * problem.chunks, size=size, more=more)
            found.append((span, lengthen(problem, words, more, size)))
    return found


def _blocks(problem: Problem, tries: int) -> list[list[Word]]:
    """The words of some repeated building blocks that fit into memory, those with the shortest interval first."""
    random = Random(0)
    interval, longest = problem.work or 1.0, math.inf
    results: list[list[Word]] = []
    while interval < longest:
        for attempt in range(tries):
            starts = _starts(problem, interval, random, 0.15 if attempt else 0.0)
            words = None if starts is None else _repeat(problem, starts, interval)
            if words is not None and words not in results and problem.fits(words):
                results.append(words)
                longest = min(longest, 1.3 * interval)
        interval *= 1.02
    return results


def _starts(problem: Problem, interval: float, random: Random, late: float) -> list[float] | None:
    """The starts of a microbatch's ops: each as early as possible without a collision, some randomly later."""
    starts = [0.0] * len(problem.chain)
    busy: list[list[tuple[float, float]]] = [[] for _ in problem.caps]
    for letter in problem.chain:
        device, time = problem.device_of[letter], problem.times[letter]
        earliest = 0.0
        for need in problem.needs[letter]:
            hop = problem.costs.hop if problem.device_of[need] != device else 0.0
            earliest = max(earliest, starts[need] + problem.times[need] + hop)
        if letter % 3 != W and random.random() < late:
            earliest += random.choice((0.5, 1.0, 1.5)) * time
        start = _free(busy[device], earliest, time, interval)
        if start is None:
            return None
        starts[letter] = start
        busy[device].append((start % interval, time))
    return starts


def _free(busy: list[tuple[float, float]], start: float, time: float, interval: float) -> float | None:
    """The first start, not before the given one, at which a device is free for ``time``, modulo the interval."""
    last, slack = start + interval * (1 + _SLACK), interval * _SLACK
    while start < last:
        before = start
        for began, length in busy:
            since = (start - began) % interval
            if interval - since < slack:
                since = 0.0
            if since < length - slack:
                start += length - since
            elif since + time > interval + slack:
                start += interval - since + length
        if start == before:
            return start
    return None


def _repeat(problem: Problem, starts: list[float], interval: float) -> list[Word]:
    words: list[Word] = [[] for _ in problem.caps]
    # Ops without duration may start at the same time, so the chain's order decides. Rounded times repeat exactly.
    chain, chunks = [*enumerate(problem.chain)], range(problem.chunks)
    for *_, letter in sorted((round(starts[x] / interval + k, 6), rank, x) for rank, x in chain for k in chunks):
        words[problem.device_of[letter]].append(letter)
    return words
