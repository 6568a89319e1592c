"""A schedule whose ops have start times: squeezed, and reordered."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.play import play
from splitpipe.schedule.reorder import peak, reordered


@dataclass(frozen=True, init=False)
class Tiling(Schedule):
    """A schedule whose ops have start times: a block that was repeated.

    Args:
        rows: the ops of each device, first one first.
        placement: the device of each stage.
        starts: of each op, a row a device.
        costs: how long ops take.
        name: for pictures and messages.

    Example:
        >>> tiling = BuildingBlock([Pass("F", 0, 0), Pass("BW", 0, 2)], placement=[0], interval=4).repeat(2)
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
        object.__setattr__(self, "starts", tuple(map(tuple, starts)))
        object.__setattr__(self, "costs", costs)

    @cached_property
    def makespan(self) -> float:
        """From the start of the first op to the end of the last one."""
        times = self.costs.times(self)
        ends = (start + times[op.kind][op.stage] for each in zip(self.rows, self.starts) for op, start in zip(*each))
        return max(ends) - min(row[0] for row in self.starts if row)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each device, how many microbatches' activations are alive at once, in those of its whole share."""
        return tuple(peak(row) / max(1, self.placement.count(device)) for device, row in enumerate(self.rows))

    def squeeze(self) -> Tiling:
        """Every op as soon as possible, in the same order. (arXiv 2405.15362)"""
        return _played(self.rows, self.placement, self.costs, self.name)

    def reorder(self, memory: float = 0) -> Tiling:
        """Ops pulled into holes where memory is not at its peak: in warm-up and cool-down, above all.

        The makespan is never higher than before. (arXiv 2405.15362; how it is done here: see reorder.py)

        Args:
            memory: how many microbatches' activations a device may hold, if its peak is lower; else that stays.
        """
        return _played(reordered(self, self.costs, memory).rows, self.placement, self.costs, self.name)


def _played(rows: Sequence[Sequence[Op]], placement: Sequence[int], costs: Costs, name: str) -> Tiling:
    schedule = Schedule(rows, placement, name)
    return Tiling(rows, placement, play(schedule, costs.times(schedule), costs.hops(schedule))[0], costs, name)
