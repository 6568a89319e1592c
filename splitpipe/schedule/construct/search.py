"""Searches for the best schedule for given costs, with a limit on memory."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from random import Random
from typing import Literal

from splitpipe.schedule.construct.block import BlockOp, BuildingBlock
from splitpipe.schedule.construct.library import SCHEDULES, variants, verify_numbers
from splitpipe.schedule.construct.reorder import pulled
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import Kind, Op, Schedule, counted, dependencies, listed
from splitpipe.schedule.timeline import simulate

_PACE = 50_000  # Roughly the number of ops that are reordered per second.
_LEAST = 8  # The number of blocks that are reordered in any case.
_SLACK = 1e-9  # As a fraction of an interval; rounding errors are smaller.


def search(
    devices: int, chunks: int, costs: Costs | None = None, memory: float | Sequence[float] | None = None,
    stages_per_device: int | None = None, seconds: float = 5.0, span: Literal["makespan", "longest"] = "makespan",
) -> Schedule:
    """Returns the shortest schedule that it finds, with a limit on memory.

    It makes many building blocks, each with the ops of a microbatch as early as they collide with none, and some at
    random later, and repeats them. The shortest of these, and the named schedules, are reordered. So the result is
    never longer than a named schedule that fits. The blocks are those of "Pipeline Parallelism with Controllable
    Memory" (arXiv 2405.15362, section 3), with real times instead of equal slots.

    Args:
        devices: number of devices, at least 1.
        chunks: number of microbatches, at least 1.
        costs: of the ops, in any unit. Default: F, B and W take 1, and copies take no time.
        memory: the number of microbatches whose activations, on all stages of a device, may be alive there at once; a
            number, or one per device. Default: all.
        stages_per_device: 1; 2, with V or loop placement; or more, with loop placement. Default: as many as the costs
            are for, or else the better of 1 and 2.
        seconds: roughly how long to search on one core. The named schedules and the first few blocks are tried in any
            case, which takes longer for many thousands of ops. Work is counted rather than time: the same arguments
            give the same schedule.
        span: what to minimise: ``"makespan"``, or ``"longest"``, the longest span of a device, for devices that needn't
            wait for each other between steps.

    Raises:
        TypeError: ``costs`` isn't a Costs.
        ValueError: a number is invalid, the costs are for another number of stages, nothing fits into the memory, or
            the costs recompute.

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
    caps, counts = _caps(memory, devices, chunks), _counts(costs, devices, stages_per_device)
    starts: list[Schedule] = []
    places = [place for v in counts for place in _placements(devices, v)]
    for placement in places:
        most = max(_LEAST, int(seconds * _PACE / len(places) / (3 * len(placement) * chunks)))
        starts += _repeated(placement, chunks, costs, caps, most)
    starts += [_split(schedule) for name in SCHEDULES for _, schedule in variants(name, devices, chunks, counts)
               if schedule.stages in [devices * v for v in counts]]
    found = [each for one in starts if _fits(one, caps) for each in (one, pulled(one, costs, caps))]
    best = min(found, key=lambda each: attrgetter(span)(simulate(each, costs)))
    return replace(best, name="search")


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


def _split(schedule: Schedule) -> Schedule:
    """With B and W for each BW, which takes no longer."""
    parts: dict[Kind, tuple[Kind, ...]] = {"F": ("F",), "B": ("B",), "W": ("W",), "BW": ("B", "W")}
    rows = [[Op(part, *op[1:]) for op in row for part in parts[op.kind]] for row in schedule.rows]
    return Schedule(rows, schedule.placement)


def _fits(schedule: Schedule, caps: Sequence[float]) -> bool:
    return all(peak <= cap + 1e-9 for peak, cap in zip(schedule.peak_activations, caps))


def _repeated(
    placement: Sequence[int], chunks: int, costs: Costs, caps: Sequence[float], most: int
) -> list[Schedule]:
    """The schedules of the best building blocks that fit into memory, by their makespan with a few microbatches."""
    few = min(chunks, 2 * len(caps) + 4)
    random, rated = Random(0), dict[Schedule, tuple[float, BuildingBlock]]()
    work = [0.0] * len(caps)
    times = costs.times(Schedule([()] * len(caps), placement))
    for device, forward, backward in zip(placement, times["F"], times["BW"]):
        work[device] += forward + backward
    interval, longest = max(work) or 1.0, math.inf
    while interval < longest:
        for attempt in range(2 + most // 8):
            block = _block(placement, costs, interval, random, 0.15 if attempt else 0.0)
            if block is None:
                continue
            schedule = block.repeat(few)
            if schedule not in rated and _fits(schedule, caps):
                rated[schedule] = simulate(schedule, costs).makespan, block
                longest = min(longest, 1.3 * interval)
        interval *= 1.02
    best = sorted(rated.values(), key=itemgetter(0))[:most]
    return [block.repeat(chunks) for _, block in best]


def _block(
    placement: Sequence[int], costs: Costs, interval: float, random: Random, late: float
) -> BuildingBlock | None:
    """Each op of a microbatch as early as possible without a collision, some randomly later."""
    stages, empty = len(placement), Schedule([()] * (1 + max(placement)), placement)
    times, hops = costs.times(empty), costs.hops(empty)
    starts: dict[Op, float] = {}
    busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
    chain = [Op("F", stage, 0) for stage in range(stages)]
    chain += [Op(kind, stage, 0) for stage in reversed(range(stages)) for kind in ("B", "W")]
    for op in chain:
        device, time, earliest = placement[op.stage], times[op.kind][op.stage], 0.0
        for need in dependencies(op, stages):
            hop = 0.0 if need.stage == op.stage else hops[min(need.stage, op.stage)]
            earliest = max(earliest, starts[need] + times[need.kind][need.stage] + hop)
        if op.kind != "W" and random.random() < late:
            earliest += random.choice((0.5, 1.0, 1.5)) * time
        start = _free(busy[device], earliest, time, interval)
        if start is None:
            return None
        starts[op] = start
        busy[device].append((start % interval, time))
    return BuildingBlock([BlockOp(*op[:2], start) for op, start in starts.items()], placement, interval, costs)


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
