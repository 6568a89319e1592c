"""A schedule whose ops have start times: squeezed, and reordered."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

from splitpipe.schedule.construct.reorder import peak, reordered
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import Op, Schedule, listed
from splitpipe.schedule.play import play


@dataclass(frozen=True, init=False)
class Tiling(Schedule):
    """A schedule whose ops have start times: a block that was repeated.

    Args:
        rows: the ops of each device, first one first.
        placement: the device of each stage.
        starts: of each op, a row a device; none if they are not known before ``squeeze``.
        costs: how long ops take.
        name: for pictures and messages.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: there are more or fewer starts than ops, or one is no number.

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
        self,
        rows: Iterable[Iterable[Op]],
        placement: Iterable[int],
        starts: Iterable[Iterable[float]],
        costs: Costs,
        name: str = "",
    ) -> None:
        super().__init__(rows, placement, name)
        verify_costs(costs)
        object.__setattr__(self, "starts", _verified(starts, self.rows))
        object.__setattr__(self, "costs", costs)

    @cached_property
    def makespan(self) -> float:
        """From the start of the first op to the end of the last one."""
        times = self.costs.times(self)
        ends = (start + times[op.kind][op.stage] for each in zip(self.rows, self.starts) for op, start in zip(*each))
        return max(ends) - min(row[0] for row in self.starts if row)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each device, the most activations that are alive at once; 1 is a microbatch's on all of its stages."""
        return tuple(peak(row) / max(1, self.placement.count(device)) for device, row in enumerate(self.rows))

    def squeeze(self) -> Tiling:
        """Every op as soon as possible, in the same order. (arXiv 2405.15362)"""
        return _played(self.rows, self.placement, self.costs, self.name)

    def reorder(self, memory: float = 0) -> Tiling:
        """Ops pulled into holes where memory is not at its peak: in warm-up and cool-down, above all.

        The makespan is never higher than before. (arXiv 2405.15362; how it is done here: see reorder.py)

        Args:
            memory: how many microbatches' activations a device may hold, if its peak is lower; else that stays.

        Raises:
            ValueError: ``memory`` is negative, or no number.
        """
        if not 0 <= real(memory) < math.inf:
            raise ValueError(f"memory={memory!r}: expected a number of microbatches, not negative and finite.")
        return _played(reordered(self, self.costs, memory).rows, self.placement, self.costs, self.name)


def _verified(starts: object, rows: Sequence[Sequence[Op]]) -> tuple[tuple[float, ...], ...]:
    """The starts of each row, as many as it has ops."""
    lists = listed(starts)
    numbers = [row for row in map(listed, lists or ()) if row is not None]
    if lists is None or len(numbers) < len(lists) or any(_odd(start) for row in numbers for start in row):
        raise TypeError(f"starts is {starts!r}: expected a row of numbers for each device, the start of each op.")
    if numbers and [len(row) for row in numbers] != [len(row) for row in rows] or any(
        start != start for row in numbers for start in row
    ):
        raise ValueError(f"starts is {starts!r}: expected a number for each op, a row a device.")
    return tuple(map(tuple, numbers))


def _odd(start: object) -> bool:
    return type(start) not in (int, float) and (isinstance(start, bool) or not isinstance(start, Real))


def _played(rows: Sequence[Sequence[Op]], placement: Sequence[int], costs: Costs, name: str) -> Tiling:
    schedule = Schedule(rows, placement, name)
    return Tiling(rows, placement, play(schedule, costs.times(schedule), costs.hops(schedule))[0], costs, name)
