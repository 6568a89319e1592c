"""Simulates a schedule: every op starts as soon as its device is free and its inputs have arrived.

The ops that an op waits for don't depend on the costs. So all ops are sorted once, such that each comes after those
that it waits for; a simulation then looks at each op once.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitpipe.schedule.costs import Costs, spread
from splitpipe.schedule.op import Kind, Op, Schedule

Times = Mapping[Kind, Sequence[float]]

_KINDS: dict[str, int] = {"F": 0, "B": 1, "W": 2, "BW": 3}


class OpOrder:
    """A schedule's ops in an order in which they can run; in a deadlock, only the ops that run before it."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.ops: list[Op] = []
        # For each op, the indices of: the op before it on its device, the op in another stage that it waits for, the
        # hop between the two, its time among the times of all kinds. If there is none: -1, a dummy at each list's end.
        self._links: list[tuple[int, int, int, int]] = []
        self._rows: list[list[int]] = [[] for _ in schedule.rows]
        self._follow()
        #: The number of ops of each device that run before the device waits forever.
        self.reached = [len(row) for row in self._rows]

    def play(self, costs: Costs, times: Times | None = None) -> tuple[list[list[float]], list[list[float]]]:
        """The start and end of each op, one row per device. ``times``: of ops, instead of those in the costs."""
        starts, ends = self._played(costs, times or costs.times(self._schedule))
        return [[starts[op] for op in row] for row in self._rows], [[ends[op] for op in row] for row in self._rows]

    def makespan(self, costs: Costs) -> float:
        """The time at which the last op ends."""
        return max(self._played(costs, costs.times(self._schedule))[1])

    def _played(self, costs: Costs, times: Times) -> tuple[list[float], list[float]]:
        takes = [*times["F"], *times["B"], *times["W"], *times["BW"]]
        hops = [*costs.hops(self._schedule), 0.0]
        # The last entry is the dummy, which ends at 0.
        starts, ends = [0.0] * (len(self.ops) + 1), [0.0] * (len(self.ops) + 1)
        again = spread("recompute", costs.recompute, self._schedule)
        aheads = [0.0] * len(self.ops)  # For how long an op recomputes before it waits for its gradient.
        if any(again):
            stop = self._schedule.microbatches - costs.uncheckpointed
            aheads = [again[stage] if k < stop and kind[0] == "B" else 0.0 for kind, stage, k in self.ops]
        for op, ((before, other, hop, place), ahead) in enumerate(zip(self._links, aheads)):
            now = ends[before] + ahead
            arrived = ends[other] + hops[hop]
            if arrived > now:
                now = arrived
            starts[op] = now - ahead
            ends[op] = now + takes[place]
        return starts, ends

    def _follow(self) -> None:
        """Numbers the ops in an order in which they can run: each device proceeds as far as possible."""
        schedule, numbered, links = self._schedule, self.ops, self._links
        stages = schedule.stages
        done = {-1: -1}  # The key is a number for each microbatch in each stage, even for F, odd for B or BW.
        waiting: dict[int, list[int]] = {}
        ready = list(range(schedule.devices))
        while ready:
            device = ready.pop()
            row, ops = self._rows[device], schedule.rows[device]
            before = row[-1] if row else -1
            for op in ops[len(row):]:
                kind, stage, microbatch = op
                key = 2 * (microbatch * stages + stage)
                if kind == "F":
                    own, other, hop = -1, key - 2 if stage else -1, stage - 1
                elif kind == "W":
                    own, other, hop = key + 1, -1, -1
                else:
                    own, other, hop = key, key + 3 if stage + 1 < stages else -1, stage
                if own not in done or other not in done:
                    waiting.setdefault(other, []).append(device)  # Its own stage's op comes later here, or is missing.
                    break
                # The op of the same stage is before it on this device.
                links.append((before, done[other], hop, _KINDS[kind] * stages + stage))
                before = len(numbered)
                numbered.append(op)
                row.append(before)
                if kind != "W":
                    key += kind != "F"
                    done[key] = before
                    if key in waiting:
                        ready += waiting.pop(key)
