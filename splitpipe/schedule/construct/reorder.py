"""Moves ops into gaps, forward and in reversed time, so that a schedule takes less time and no more memory.

Ops are placed one by one, in the order of their current starts. Each goes into the first gap on its device after the
ops that it needs, from which on memory isn't at its peak. No op starts later than before: when it is placed, the ops
before it end no later than they did, so its old place is free.

Then the same from the end. In reversed time, an op waits for those that need it, W takes an activation, and F releases
it. Ops that ran as early as possible now run as late as possible, and leave other gaps. This alternates until it gains
nothing. In project planning, it is called double justification (Valls, Ballestin, Quintanilla, "Justification and
RCPSP", European Journal of Operational Research 165, 2005); here it uses gaps, and activations are the resource.
"""
from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitpipe.schedule.bounds import bounds
from splitpipe.schedule.check import check
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import CHANGES, Op, Schedule, dependencies
from splitpipe.schedule.play import OpOrder, Times

#: Times are equal if they differ by less than this fraction of the makespan.
NEAR = 1e-11
#: The minimum length of an op, as a fraction of the makespan, so that no two ops of a device start at once.
TINY = 1e-9


def reorder(schedule: Schedule, costs: Costs | None = None, memory: float = 0) -> Schedule:
    """Moves ops into gaps where memory isn't at its peak, mostly in warm-up and cool-down. (arXiv 2405.15362)

    Args:
        schedule: such as a repeated building block.
        costs: the times of its ops. Default: F, B and W take 1, and copies take no time.
        memory: the number of microbatches whose activations a device may hold. A device with a higher peak keeps that.

    Returns:
        A schedule that takes less time, or the same one if none is found.

    Raises:
        TypeError: ``schedule`` isn't a Schedule, or ``costs`` isn't a Costs.
        ValueError: the schedule can't run (see ``check``), the costs are for another number of stages, or ``memory`` is
            negative or not a number.

    Example:
        >>> from splitpipe import schedule
        >>> plain, costs = schedule.build("1f1b", 4, 8), Costs(copy=1)
        >>> other = reorder(plain, costs, memory=7)
        >>> schedule.simulate(plain, costs).makespan, schedule.simulate(other, costs).makespan
        (49.0, 39.0)
    """
    check(schedule)
    costs = Costs() if costs is None else costs
    verify_costs(costs)
    if not 0 <= real(memory) < math.inf:
        raise ValueError(f"memory={memory!r}: expected a number of microbatches, finite and not negative.")
    return pulled(schedule, costs, [memory] * schedule.devices)


def pulled(schedule: Schedule, costs: Costs, memory: Sequence[float]) -> Schedule:
    """The schedule, reordered, with the memory of each device."""
    runnable, costs = OpOrder(schedule), replace(costs, recompute=0)
    starts, ends = runnable.play(costs)
    span = max(row[-1] for row in ends if row)
    if not span:
        return schedule
    times = {kind: [max(time, TINY * span) for time in each] for kind, each in costs.times(schedule).items()}
    starts = runnable.play(costs, times)[0]
    shares = [max(1, schedule.placement.count(device)) for device in range(schedule.devices)]
    caps = [max(peak, math.floor(cap * share + NEAR)) for peak, cap, share in zip(schedule.peaks, memory, shares)]
    least = max(bounds(schedule, costs, [cap / share for cap, share in zip(caps, shares)]).values())
    jobs = _jobs(schedule, times, costs.hops(schedule), caps, NEAR * span)
    moved = _justify(jobs, [start for row in starts for start in row], least)
    if _makespan(jobs, moved) >= span - jobs.near:
        return schedule
    ops = [op for row in schedule.rows for op in row]
    rows: list[list[Op]] = [[] for _ in schedule.rows]
    for job in sorted(range(len(moved)), key=moved.__getitem__):
        rows[jobs.device[job]].append(ops[job])
    return Schedule(rows, schedule.placement, schedule.name)


@dataclass(frozen=True)
class _Jobs:
    """A schedule's ops by number. Lists have one value per op."""

    device: list[int]
    time: list[float]
    change: list[int]  # Activations that it takes at its start, or (below 0) releases at its end.
    before: list[list[tuple[int, float]]]  # The ops that it waits for, and how long after their end.
    after: list[list[tuple[int, float]]]  # The ops that wait for it, likewise.
    caps: list[int]  # For each device, how many activations may be alive.
    near: float  # Times that differ by less are equal.


def _jobs(schedule: Schedule, times: Times, hops: Sequence[float], caps: list[int], near: float) -> _Jobs:
    ops = [op for row in schedule.rows for op in row]
    number = {(op.kind[0], op.stage, op.microbatch): job for job, op in enumerate(ops)}
    after: list[list[tuple[int, float]]] = [[] for _ in ops]
    before: list[list[tuple[int, float]]] = [[] for _ in ops]
    for job, op in enumerate(ops):
        for need in dependencies(op, schedule.stages):
            other = number[need.kind, need.stage, need.microbatch]
            hop = 0.0 if need.stage == op.stage else hops[min(need.stage, op.stage)]
            before[job].append((other, hop))
            after[other].append((job, hop))
    time, change = [times[op.kind][op.stage] for op in ops], [CHANGES[op.kind] for op in ops]
    return _Jobs([schedule.placement[op.stage] for op in ops], time, change, before, after, caps, near)


def _justify(jobs: _Jobs, starts: list[float], least: float) -> list[float]:
    """Starts with a shorter makespan, by moving ops to both ends in turn; ``least`` is short enough."""
    reverse = replace(jobs, before=jobs.after, after=jobs.before, change=[-change for change in jobs.change])
    starts, before = _pull(jobs, starts), math.inf
    while before - jobs.near > (span := _makespan(jobs, starts)) > least + jobs.near:
        before = span
        starts = _pull(jobs, _mirror(jobs, _pull(reverse, _mirror(jobs, starts))))
    return starts


def _makespan(jobs: _Jobs, starts: list[float]) -> float:
    return max(start + time for start, time in zip(starts, jobs.time))


def _mirror(jobs: _Jobs, starts: list[float]) -> list[float]:
    span = _makespan(jobs, starts)
    return [span - start - time for start, time in zip(starts, jobs.time)]


def _pull(jobs: _Jobs, starts: list[float]) -> list[float]:
    """Each job as early as possible, in order of their starts. None starts later than before."""
    near, caps = jobs.near, jobs.caps
    earliest = [0.0] * len(starts)
    ends = [0.0] * len(starts)
    holes = [[(0.0, float("inf"))] for _ in caps]
    changes: list[list[tuple[float, int]]] = [[] for _ in caps]  # Changes of the number alive, by time.
    alive = [0] * len(caps)  # After all changes.
    for job in sorted(range(len(starts)), key=starts.__getitem__):
        device, time, change = jobs.device[job], jobs.time[job], jobs.change[job]
        start = 0.0
        for need, hop in jobs.before[job]:
            if ends[need] + hop > start:
                start = ends[need] + hop
        if change > 0 and alive[device] + change > 0:
            start = _below(caps[device], alive[device], changes[device], start)
        own = holes[device]
        place = 0
        while own[place][1] + near < (start if start > own[place][0] else own[place][0]) + time:
            place += 1
        left, right = own[place]
        begin = earliest[job] = start if start > left else left
        end = ends[job] = begin + time
        own[place : place + 1] = [(a, b) for a, b in ((left, begin), (end, right)) if b - a > near]
        if change:
            insort(changes[device], (begin if change > 0 else end, change))
            alive[device] += change
    return earliest


def _below(cap: int, alive: int, changes: list[tuple[float, int]], start: float) -> float:
    """The time, not before ``start``, from which less than ``cap`` is alive; ``alive`` are after all changes."""
    for time, change in reversed(changes):
        alive -= change
        if time <= start:
            return start
        if alive >= cap:
            return time
    return start
