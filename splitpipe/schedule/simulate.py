"""Simulates a schedule: when each op would run, if every op took what the costs say."""
from __future__ import annotations

from splitpipe.schedule.check import checked
from splitpipe.schedule.costs import Bytes, Costs, verify_bytes, verify_costs
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.played import Span
from splitpipe.schedule.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | None = None, bytes: Bytes | None = None) -> Timeline:
    """Plays a schedule: every op starts as soon as its device is free and what it needs has arrived.

    Args:
        schedule: to play.
        costs: of its ops; None: F, B and W take 1, copies nothing.
        bytes: what activations take, for ``peak_bytes``.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: the schedule can't run (see ``check``), or costs or bytes are for another number of stages.

    Example:
        >>> from splitpipe import schedule
        >>> timeline = simulate(schedule.build("zb-h1", devices=4, chunks=8), Costs(copy=0.1))
        >>> round(timeline.makespan, 3), timeline.makespan >= max(timeline.bounds.values())
        (28.2, True)
    """
    course = checked(schedule)
    costs = Costs() if costs is None else costs
    verify_costs(costs)
    times = costs.times(schedule)
    if bytes is not None:
        verify_bytes(bytes)
        bytes.changes(schedule)
    starts, ends = course.play(times, costs.hops(schedule), costs.again(schedule))
    spans = [tuple(map(Span, *each)) for each in zip(schedule.rows, starts, ends)]
    return Timeline(schedule, costs, tuple(spans), bytes)
