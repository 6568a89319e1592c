"""Building blocks: the ops of one microbatch, and the schedule that results from repeating them."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from splitpipe.schedule.check import check
from splitpipe.schedule.costs import Costs, real, verify_costs
from splitpipe.schedule.op import Kind, Op, Schedule, as_placement, dependencies, listed, source_of

#: Times are equal if they differ by less than this fraction of an interval.
NEAR = 1e-6

#: The most ops that a block may be repeated to, which take gigabytes.
MOST = 30_000_000
_DEVICES = 1_000_000

#: The order of ops without duration that start at the same time, in which they can run.
RANK: dict[Kind, int] = {"F": 0, "B": 1, "BW": 1, "W": 2}


class BlockOp(NamedTuple):
    """An op of a building block, and when it starts.

    Attributes:
        kind: "F", "B", "W" or "BW".
        stage: counted from 0, in the model's order.
        start: the time at which it starts, in the unit of the costs.
        microbatch: counted from 0 within the block.

    Example:
        >>> BlockOp("BW", stage=2, start=7).op
        Op(kind='BW', stage=2, microbatch=0)
    """

    kind: Kind
    stage: int
    start: float
    microbatch: int = 0

    def __str__(self) -> str:
        return str(self.op)

    @property
    def op(self) -> Op:
        """The op without the start."""
        return Op(self.kind, self.stage, self.microbatch)


def _rounded(intervals: float) -> float:
    """So that equal times are equal, whatever their rounding errors; finer than NEAR."""
    return round(intervals, 7)


def _is_block_op(value: object) -> bool:
    return (isinstance(value, BlockOp) and isinstance(value.kind, str)
            and type(value.stage) is type(value.microbatch) is int and not math.isnan(real(value.start)))


@dataclass(frozen=True)
class BuildingBlock:
    """The ops of one microbatch, or of a few, on all devices: the unit that a schedule repeats.

    Args:
        ops: F and BW, or F, B and W, of each stage and microbatch of the block.
        placement: the device of each stage.
        interval: time from the start of one block to the start of the next.
        costs: how long ops take. Default: in every stage, one slot for each F, B and W and two for a BW.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is invalid, or an op belongs to no stage.

    Example:
        1F1B on three devices. F goes down the devices in one slot each, BW up in two slots each. A device has three
        slots of work, so blocks start three slots apart:

        >>> def block(down, up, costs=None):
        ...     ops = [BlockOp("F", i, start) for i, start in enumerate(down)]
        ...     ops += [BlockOp("BW", i, start) for i, start in enumerate(up)]
        ...     return BuildingBlock(ops, placement=[0, 1, 2], interval=3, costs=costs)
        >>> one = block(down=[0, 1, 2], up=[7, 5, 3])
        >>> one.peak_activations
        (3.0, 2.0, 1.0)
        >>> print(one.repeat(4))
        0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3
        1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3
        2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3

        With copies that take time, this can't run. Eager 1F1B leaves a slot and a half for each copy, at the cost of
        memory:

        >>> costs = Costs(copy=1.5)
        >>> block([0, 1, 2], [7, 5, 3], costs).repeat(4)
        Traceback (most recent call last):
        ValueError: 1F0 starts at 1, and 0F0, which it needs, ends at 1 and is copied until 2.5: expected it to ...
        >>> eager = block([0, 2.5, 5], [13, 9.5, 6], costs)
        >>> eager.peak_activations
        (5.0, 3.0, 1.0)
    """

    ops: Sequence[BlockOp]
    placement: Sequence[int]
    interval: float
    costs: Costs | None = None

    def __post_init__(self) -> None:
        ops = None if isinstance(self.ops, BlockOp) else listed(self.ops)
        if ops is None or not all(map(_is_block_op, ops)):
            raise TypeError(f"ops is {self.ops!r}: expected BlockOps, such as BlockOp('F', stage=0, start=0).")
        object.__setattr__(self, "ops", tuple(ops))
        object.__setattr__(self, "placement", as_placement(self.placement))
        if self.costs is not None:
            verify_costs(self.costs)
        if not 0 < real(self.interval) < math.inf:
            raise ValueError(f"interval={self.interval!r}: expected a positive time from one block to the next.")
        if not all(0 <= device < _DEVICES for device in self.placement):
            raise ValueError(f"placement={self.placement}: expected devices counted from 0, below {_DEVICES:,}.")
        for one in self.ops:
            is_known = one.kind in RANK and 0 <= one.stage < len(self.placement)
            if not is_known or one.microbatch < 0 or math.isinf(one.start):
                raise ValueError(
                    f"{one!r} is an op of the block: expected F, B, W or BW of a stage below {len(self.placement)}, a "
                    "microbatch from 0, and a finite start."
                )

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches in the block."""
        return 1 + max((one.microbatch for one in self.ops), default=-1)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each device, the most activations that can be alive at once; 1 is those of one microbatch on all its
        stages.

        Computed from lifespans, each from the start of F to the end of W or BW: each interval adds one of the kind, so
        an op counts ceil(lifespan / interval). (arXiv 2405.15362)

        Raises:
            ValueError: an op is missing, or is there twice.
        """
        check(self._one)
        alive = [0] * self._one.devices
        begin = {one.op: one.start for one in self.ops}
        for one in self.ops:
            if one.kind in ("W", "BW"):
                lifespan = self._end(one) - begin[Op("F", one.stage, one.microbatch)]
                alive[self.placement[one.stage]] += math.ceil(lifespan / self.interval - NEAR)
        return tuple(count / max(1, self.placement.count(device)) for device, count in enumerate(alive))

    def repeat(self, chunks: int) -> Schedule:
        """Repeats the block, one interval after the other.

        Args:
            chunks: the number of microbatches. If the last block holds more, the surplus is dropped.

        Raises:
            ValueError: two ops of one device overlap modulo the interval; an op starts before the ops that it needs
                have ended; or an op is missing, or is there twice.
        """
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"chunks={chunks!r}: expected a whole number of at least 1.")
        if chunks * len(self.ops) > MOST:
            raise ValueError(f"chunks={chunks} makes too many ops: expected at most {MOST:,}.")
        check(self._one)
        self._verify_needs()
        self._verify_apart()
        rows: list[list[tuple[float, Op]]] = [[] for _ in self._one.rows]
        for kind, stage, start, k in self.ops:
            for n in range(-((k - chunks) // self.microbatches)):
                op = Op(kind, stage, k + n * self.microbatches)
                rows[self.placement[stage]].append((_rounded(start / self.interval + n), op))
        for row in rows:
            row.sort(key=lambda each: (each[0], *self._rank(each[1])))
        return Schedule([[op for _, op in row] for row in rows], self.placement)

    @cached_property
    def _costs(self) -> Costs:
        slots = [1] * len(self.placement)
        return self.costs or Costs(slots, slots, slots)

    @cached_property
    def _one(self) -> Schedule:
        """The ops of one block, in an order that can run whatever their start times."""
        rows: list[list[Op]] = [[] for _ in range(1 + max(self.placement, default=-1))]
        for one in sorted(self.ops, key=lambda one: (RANK[one.kind], one.stage * (1 if one.kind == "F" else -1))):
            rows[self.placement[one.stage]].append(one.op)
        return Schedule(rows, self.placement)

    @cached_property
    def _times(self) -> dict[Kind, list[float]]:
        return self._costs.times(self._one)

    def _rank(self, op: Op) -> tuple[bool, int, int, int]:
        """A sort key for ops that start at the same time: those without duration first, in an order that can run."""
        kind, stage, k = op
        return self._times[kind][stage] > NEAR * self.interval, k, RANK[kind], stage if kind == "F" else -stage

    def _end(self, one: BlockOp) -> float:
        return one.start + self._times[one.kind][one.stage]

    def _verify_needs(self) -> None:
        sources, hops = {source_of(one.op): one for one in self.ops}, self._costs.hops(self._one)
        for one in self.ops:
            for need in dependencies(one.op, len(self.placement)):
                other = sources[need]
                hop = hops[min(one.stage, other.stage)] if other.stage != one.stage else 0.0
                end = self._end(other)
                if one.start < end + hop - NEAR * self.interval:
                    copied = f" and is copied until {end + hop:g}" if hop else ""
                    raise ValueError(
                        f"{one} starts at {one.start:g}, and {other}, which it needs, ends at {end:g}{copied}: "
                        "expected it to start no earlier."
                    )

    def _verify_apart(self) -> None:
        for device in range(self._one.devices):
            mine = [one for one in self.ops if self.placement[one.stage] == device]
            own = sorted(
                (_rounded(one.start / self.interval % 1) % 1 * self.interval, self._end(one) - one.start, one)
                for one in mine
            )
            for place, (at, time, one) in enumerate(own):
                last = place + 1 == len(own)
                slot, _, other = own[0] if last else own[place + 1]
                if at + time > slot + (self.interval if last else 0) + NEAR * self.interval:
                    raise ValueError(
                        f"{one}, which starts at {one.start:g} and takes {time:g}, collides with {other}, which starts "
                        f"at {other.start:g}: device {device} would run both in slot {slot:g} modulo the interval of "
                        f"{self.interval:g}. Start one at another time."
                    )
