"""Why the devices of a recorded step don't always compute: how much of that time is due to what."""
from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.play import Course
from splitpipe.schedule.played import Played

STAGES, ORDER, COPIES, WAITING = "unbalanced stages", "the schedule's own bubble", "copies", "waiting beyond the plan"


def losses(shown: Played, plan: Played) -> dict[str, float]:
    """How long a device is idle on average, by reason. A number may be negative: what is faster so than otherwise.

    The plan is played twice more: with as much work on every device, which shows what unequal stages cost; and
    without copies too, which leaves the order of ops alone. What the step is idle beyond its plan has other reasons.

    Args:
        shown: the step.
        plan: the same ops, simulated with the measured costs.
    """
    times = plan.costs().times(plan.schedule)
    devices = len(set(plan.schedule.placement))
    forward, b, w = (sum(times[kind]) / devices for kind in ("F", "B", "W"))
    even = Costs(forward, b, w, plan.costs().copy)
    balanced, alone = _makespan(plan, even), _makespan(plan, replace(even, copy=0))
    return {
        STAGES: plan.makespan - balanced,
        ORDER: alone - fmean(plan.work),
        COPIES: balanced - alone,
        WAITING: fmean(shown.idle) - fmean(plan.idle),
    }


def _makespan(plan: Played, costs: Costs) -> float:
    schedule = plan.schedule
    return Course(schedule).makespan(costs.times(schedule), costs.hops(schedule), costs.again(schedule))
