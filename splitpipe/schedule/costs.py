"""The costs that a schedule is simulated with: the times of its ops."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from splitpipe.schedule.op import Kind, Schedule, counted, listed, verify

Each = float | Sequence[float]
_OPS = "forward", "backward_input", "backward_weight"


@dataclass(frozen=True)
class Costs:
    """The times of ops, in any unit. A BW takes as long as B and W together.

    Args:
        forward: the time of F for one microbatch. A number is the time of all stages of a device together, which have
            equal shares; a sequence has the time of each stage.
        backward_input: the time of B, likewise.
        backward_weight: the time of W, likewise.
        copy: the time from one device to another. Devices can compute meanwhile. A number is the time of every hop; a
            sequence, one shorter than the number of stages, has the time from each stage to the next and back.
        recompute: with checkpointing, the time for which the backward of a microbatch runs before it waits for its
            gradient, given like ``forward``.
        uncheckpointed: how many of the last microbatches aren't checkpointed.

    Raises:
        ValueError: a time is negative or not finite; or ``uncheckpointed`` is negative, or not a whole number.

    Example:
        >>> Costs(forward=3, backward_input=[4, 4, 2, 2], backward_weight=2, copy=0.5).copy
        0.5
    """

    forward: Each = 1
    backward_input: Each = 1
    backward_weight: Each = 1
    copy: Each = 0
    recompute: Each = 0
    uncheckpointed: int = 0

    def __post_init__(self) -> None:
        for name in (*_OPS, "copy", "recompute"):
            object.__setattr__(self, name, _verified(name, getattr(self, name)))
        if type(self.uncheckpointed) is not int or self.uncheckpointed < 0:
            raise ValueError(f"uncheckpointed={self.uncheckpointed!r}: expected a number of microbatches, 0 or more.")

    def times(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """The time of each kind of op in each stage of ``schedule``.

        Raises:
            TypeError: ``schedule`` isn't a Schedule.
            ValueError: there are more or fewer times than stages.
        """
        verify(schedule)
        forward, b, w = (spread(name, getattr(self, name), schedule) for name in _OPS)
        return {"F": forward, "B": b, "W": w, "BW": [one + other for one, other in zip(b, w)]}

    def hops(self, schedule: Schedule) -> list[float]:
        """The time from each stage of ``schedule`` to the next one, and back; 0 between stages of one device.

        Raises:
            TypeError: ``schedule`` isn't a Schedule.
            ValueError: there are more or fewer times than hops.
        """
        verify(schedule)
        count, place = schedule.stages - 1, schedule.placement
        each = [self.copy] * count if isinstance(self.copy, (int, float)) else _counted("copy", self.copy, count, "hop")
        return [time if place[stage] != place[stage + 1] else 0.0 for stage, time in enumerate(each)]


def _verified(name: str, value: Each) -> Each:
    each = listed(value)
    numbers = tuple(real(number) for number in ([value] if each is None else each))
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{name}={value!r}: expected a time, finite and not negative, or one for each stage.")
    return numbers[0] if each is None else numbers


def real(value: object) -> float:
    """Any real number as a Python float; math.nan for anything else."""
    if type(value) is float:  # A fast path for nearly all calls.
        return value
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
    return value if type(value) is int else number


def verify_costs(value: object) -> None:
    if not isinstance(value, Costs):
        raise TypeError(f"costs is {value!r}: expected schedule.Costs, or None.")


def spread(name: str, value: Each, schedule: Schedule) -> list[float]:
    """The time of each stage."""
    if isinstance(value, (int, float)):
        return [value / share for share in schedule.shares]
    return _counted(name, value, schedule.stages, "stage")


def _counted(name: str, numbers: Sequence[float], count: int, what: str) -> list[float]:
    if len(numbers) != count:
        found, wanted = counted(len(numbers), "number"), counted(count, what)
        raise ValueError(f"{name} has {found}: expected one for each of {wanted}, or a single number.")
    return list(numbers)
