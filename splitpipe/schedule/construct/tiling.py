"""Schedules whose ops have start times: squeezed, and reordered."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from splitpipe.schedule.construct.reorder import peak, reorder
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import Op, Schedule, listed
from splitpipe.schedule.play import OpOrder


@dataclass(frozen=True, init=False)
class Tiling(Schedule):
    """A schedule whose ops have start times: a repeated building block.

    Args:
        rows: the ops of each device, in order.
        placement: the device of each stage.
        starts: the start of each op, one row per device; empty if they aren't known before ``squeeze``.
        costs: how long ops take.
        name: for pictures and messages.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there are more or fewer starts than ops.

    Example:
        >>> tiling = BuildingBlock([BlockOp("F", 0, 0), BlockOp("BW", 0, 2)], placement=[0], interval=4).repeat(2)
        >>> print(tiling, tiling.starts, tiling.makespan)
        0F0 0BW0 0F1 0BW1 ((0, 2, 4, 6),) 8
        >>> tiling.squeeze().makespan, tiling.peak_activations
        (6.0, (1.0,))
    """

    starts: tuple[tuple[float, ...], ...] = ()
    costs: Costs = Costs()

    def __init__(
        self, rows: Iterable[Iterable[Op]], placement: Iterable[int], starts: Iterable[Iterable[float]], costs: Costs,
        name: str = "",
    ) -> None:
        super().__init__(rows, placement, name)
        verify_costs(costs)
        object.__setattr__(self, "starts", _verified(starts, self.rows))
        object.__setattr__(self, "costs", costs)

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the first op to the end of the last."""
        times = self.costs.times(self)
        ends = (start + times[op.kind][op.stage] for each in zip(self.rows, self.starts) for op, start in zip(*each))
        return max(ends) - min(row[0] for row in self.starts if row)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each device, the most activations alive at once; 1 is those of a microbatch on all its stages."""
        return tuple(peak(row) / max(1, self.placement.count(device)) for device, row in enumerate(self.rows))

    def squeeze(self) -> Tiling:
        """Starts every op as early as possible, in the same order. (arXiv 2405.15362)"""
        return _played(self.rows, self.placement, self.costs, self.name)

    def reorder(self, memory: float = 0) -> Tiling:
        """Moves ops into gaps where memory isn't at its peak, mostly in warm-up and cool-down.

        The makespan never increases. (arXiv 2405.15362; reorder.py explains how it is done here.)

        Args:
            memory: the number of microbatches whose activations a device may hold. A device with a higher peak keeps
                that.

        Raises:
            ValueError: ``memory`` is negative, or not a number.
        """
        if not 0 <= real(memory) < math.inf:
            raise ValueError(f"memory={memory!r}: expected a number of microbatches, finite and not negative.")
        return _played(reorder(self, self.costs, memory).rows, self.placement, self.costs, self.name)


def _verified(starts: object, rows: Sequence[Sequence[Op]]) -> tuple[tuple[float, ...], ...]:
    lists = [listed(row) for row in listed(starts) or ()]
    numbers = tuple(tuple(row) for row in lists if row is not None)
    if listed(starts) is None or None in lists or any(math.isnan(real(start)) for row in numbers for start in row):
        raise TypeError(f"starts is {starts!r}: expected one row of numbers per device, the start of each op.")
    if numbers and [*map(len, numbers)] != [*map(len, rows)]:
        raise ValueError(f"starts is {starts!r}: expected one number per op, in one row per device.")
    return numbers


def _played(rows: Sequence[Sequence[Op]], placement: Sequence[int], costs: Costs, name: str) -> Tiling:
    schedule = Schedule(rows, placement, name)
    return Tiling(rows, placement, OpOrder(schedule).play(costs.times(schedule), costs.hops(schedule))[0], costs, name)
