"""Lower bounds of a schedule's makespan, from five different arguments."""
from __future__ import annotations

from collections.abc import Sequence

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Schedule


def bounds(schedule: Schedule, costs: Costs, cap: Sequence[float]) -> dict[str, float]:
    """Lower bounds of the makespan of any order of the schedule's ops.

    ``cap``: for each device, the most activations that may be alive at once; 1 is those of one microbatch on all stages
    of the device.
    """
    chains = _Chains(schedule, costs)
    limits = {"work": 0.0, "head + work + tail": 0.0, "chain": chains.whole, "memory": 0.0, "ramp": 0.0}
    for device in range(schedule.devices):
        stages = [stage for stage, place in enumerate(schedule.placement) if place == device]
        if not stages:
            continue
        work = schedule.microbatches * sum(chains.work[stage] for stage in stages)
        head = min(chains.before[stage] for stage in stages)
        tail = min(chains.after[stage] for stage in stages)
        units = cap[device] * len(stages)  # In activations of one stage.
        alive = schedule.microbatches * sum(chains.lifespan[stage] for stage in stages)
        values = {"work": work, "head + work + tail": head + work + tail, "memory": alive / units if units else 0.0}
        if cap[device] < schedule.microbatches:
            values["ramp"] = _ramp(chains, stages, work, units)
        for name, value in values.items():
            limits[name] = max(limits[name], value)
    return limits


def _ramp(chains: _Chains, stages: list[int], work: float, units: float) -> float:
    """The bound of a device whose memory can't hold all microbatches: its first B must come before its last F."""
    forward = max(chains.forward[stage] for stage in stages)
    backward = max(chains.work[stage] - chains.forward[stage] for stage in stages)
    hole = max(0.0, min(chains.turn[stage] for stage in stages) - units * forward)
    end = min(chains.rest[stage] for stage in stages)
    return hole + work - forward - units * backward + end


class _Chains:
    """The times between the ops of one microbatch if it ran alone. Lists have one number per stage."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        times, last = costs.times(schedule), schedule.stages - 1
        hop = costs.hops(schedule)
        split = {op.stage for row in schedule.rows for op in row if op.kind == "B"}
        both = times["BW"]
        self.forward = times["F"]
        self.work = [f + b for f, b in zip(self.forward, both)]
        # The time from the start of a stage's backward until the stage before can have its gradient.
        back = [times["B"][k] if k in split else both[k] for k in range(last + 1)]
        self.before = [0.0]  # From the beginning to the start of F.
        finish = [both[0]]  # From the start of B to the end of everything.
        self.after = [0.0]  # From the end of a device's last op, if it is on this stage, to the end of everything.
        for k in range(last):
            self.before.append(self.before[k] + self.forward[k] + hop[k])
            self.after.append(0.0 if k + 1 in split else hop[k] + finish[k])
            finish.append(max(both[k + 1], back[k + 1] + hop[k] + finish[k]))
        self.turn = [self.before[last] + self.forward[last]]  # From the beginning to the start of B.
        for k in reversed(range(last)):
            self.turn.insert(0, self.turn[0] + back[k + 1] + hop[k])
        # From the start of F to the end of W.
        self.lifespan = [self.turn[k] - self.before[k] + both[k] for k in range(last + 1)]
        self.whole = self.turn[last] + finish[last]  # The whole microbatch.
        self.rest = [self.whole - before for before in self.before]  # From the start of F to the end of everything.
