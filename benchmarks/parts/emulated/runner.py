"""A schedule on emulated devices that is run step by step, and its line of the table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.harness import measure
from benchmarks.harness.measure import Row
from benchmarks.parts.emulated import host
from benchmarks.parts.emulated.layers import Naps, Step, Took, ideal, measured
from splitpipe.schedule import Costs, Schedule


@dataclass(frozen=True)
class Case:
    """Numbers that schedules are compared for; ``seconds`` is what a whole device sleeps for one op."""

    seconds: float
    devices: int
    chunks: int

    @property
    def milliseconds(self) -> float:
        """Milliseconds of an op."""
        found = round(self.seconds * 1e3, 6)
        return int(found) if found.is_integer() else found


@dataclass
class Runner:
    """A schedule that runs.

    Attributes:
        name: in the tables.
        plan: what is to run.
        step: runs it.
        side: by whom: splitpipe, torch, or bare threads.
        late: see ``ideal``.
        runs: what the steps gave.
    """

    name: str
    plan: Schedule
    step: Step
    side: str = "splitpipe"
    late: bool = False
    runs: list[Took] = field(default_factory=list)

    def run(self) -> None:
        """A step more."""
        took = self.step()
        self.runs.append(took._replace(naps=[Naps(list(each.taken)) for each in took.naps]))

    @property
    def walls(self) -> list[float]:
        """Wall times of the steps, in seconds."""
        return [took.wall for took in self.runs]

    @property
    def wall(self) -> float:
        """Their median."""
        return statistics.median(self.walls)

    def row(self, case: Case) -> Row:
        """A line of the table."""
        ideal_time = ideal(self.plan, Costs(*3 * [case.seconds]), self.late)
        share = self.plan.stages // self.plan.devices
        slept = [ideal(self.plan, measured(took.naps, share), self.late) for took in self.runs]
        between: Row = {}
        if self.side != "torch":
            between["between ops, us"] = 1e6 * statistics.median(host.between(self.plan, took) for took in self.runs)
        return {
            "op, ms": case.milliseconds,
            "devices": case.devices,
            "chunks": case.chunks,
            "schedule": self.name,
            "wall, ms": self.wall * 1e3,
            "wall, ops": self.wall / case.seconds,
            "ideal, ops": ideal_time / case.seconds,
            "wall / ideal": self.wall / ideal_time,
            "wall / ideal of measured sleeps": measure.ratio(self.walls, slept),
            "the least": min(wall / each for wall, each in zip(self.walls, slept)),
            "side": self.side,
        } | between
