"""The measures of a schedule whose ops have times: makespan, idle time, peaks of memory."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from splitpipe.schedule.bounds import bounds
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Op, Schedule


class Span(NamedTuple):
    """An op, and when it ran."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule with the times of its ops, in the unit of the costs.

    Attributes:
        schedule: the schedule that was simulated, or recorded.
        spans: one row per device, in order.
    """

    schedule: Schedule
    _costs: Costs
    spans: tuple[tuple[Span, ...], ...]

    def costs(self) -> Costs:
        """The costs of the simulation; for a recording, those that were measured."""
        return self._costs

    @property
    def label(self) -> str:
        """The name in pictures and tables."""
        return self.schedule.name

    @property
    def remarks(self) -> tuple[str, ...]:
        """Further lines below a picture; for a recording, the reasons for its idle time."""
        return ()

    @property
    def makespan(self) -> float:
        """The time from the start of the first op to the end of the last."""
        return max(row[-1].end for row in self.spans if row)

    @property
    def longest(self) -> float:
        """The longest time that a device takes from its first op to its last.

        It is the time of a step if devices needn't wait for each other between steps.
        """
        return max(row[-1].end - row[0].start for row in self.spans if row)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The time for which each device computes."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each device computes."""
        return tuple(work / self.makespan if self.makespan else 0.0 for work in self.work)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time of the makespan in which each device doesn't compute."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def bubble(self) -> float:
        """The fraction of the makespan in which a device is idle, on average: 1 - work / makespan."""
        return 1 - sum(self.work) / len(self.work) / self.makespan if self.makespan else 0.0

    @property
    def bubble_longest(self) -> float:
        """1 - work / longest. Meaningful only if the optimizer's step doesn't synchronise all devices."""
        return 1 - sum(self.work) / len(self.work) / self.longest if self.longest else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each device, the most activations that are alive at once; 1 is those of one microbatch on all its stages.

        An activation is taken at the start of F, and released at the end of W or BW.
        """
        return self.schedule.peak_activations

    @property
    def bounds(self) -> dict[str, float]:
        """Lower bounds for any schedule of these stages and microbatches with as much memory as this one.

        * "work": that of the device with the most;
        * "head + work + tail": the same, plus the time before its first op can start and after its last one;
        * "chain": one microbatch's way through all stages and back;
        * "memory": each activation has a minimum lifespan, and only a limited number are alive at once (Little's law);
        * "ramp": before its first backward op, and after its last forward op, a device has no more to do than its
          memory holds. For V placement and equal times that is 6m + 6p - 3k - 1 ops, if k activations fit at once.
        """
        limits = bounds(self.schedule, self._costs, self.peak_activations)
        rounded = self.makespan * (1 + 1e-9)
        return {name: min(value, self.makespan) if value <= rounded else value for name, value in limits.items()}
