"""The idle time of a recorded step, divided among its reasons."""
from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.play import OpOrder
from splitpipe.schedule.timed import TimedSchedule

STAGES, ORDER, COPIES, WAITING = "unbalanced stages", "the schedule's own bubble", "copies", "waiting beyond the plan"


def idle_by_reason(step: TimedSchedule, plan: TimedSchedule) -> dict[str, float]:
    """How long a device of the step is idle on average, by reason; ``plan`` has the same ops, simulated.

    The plan is played twice more: with as much work on every device, which shows what unequal stages cost; and
    without copies too, which leaves the order of ops alone. What the step is idle beyond its plan has other reasons.
    """
    times = plan.costs().times(plan.schedule)
    devices = len(set(plan.schedule.placement))
    forward, b, w = (sum(times[kind]) / devices for kind in ("F", "B", "W"))
    even = Costs(forward, b, w, plan.costs().copy)
    balanced, alone = _makespan(plan, even), _makespan(plan, replace(even, copy=0))
    # Idle time with one reason more each time. None is less than the one before: a step that took less than its plan,
    # or stages that happen to go well with the order, leave less to the reasons before them.
    whole = fmean(step.idle)
    planned = max(0.0, min(fmean(plan.idle), whole))
    copied = min(balanced - fmean(plan.work), planned)
    ordered = max(0.0, min(alone - fmean(plan.work), copied))
    copied = max(copied, ordered)
    return {STAGES: planned - copied, ORDER: ordered, COPIES: copied - ordered, WAITING: whole - planned}


def _makespan(plan: TimedSchedule, costs: Costs) -> float:
    schedule = plan.schedule
    return OpOrder(schedule).makespan(costs.times(schedule), costs.hops(schedule), costs.again(schedule))
