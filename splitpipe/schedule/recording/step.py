"""One recorded step: the times of its ops, and the costs that follow from them."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from splitpipe.schedule.costs import Costs, real
from splitpipe.schedule.op import Kind, Schedule, listed
from splitpipe.schedule.plurals import counted
from splitpipe.schedule.timed import Span

Average = Callable[[Sequence[float]], float]
OpTimes = Mapping[tuple[Kind, int], Sequence[float]]


@dataclass(frozen=True)
class Step:
    """A training step as it ran. Times are in milliseconds.

    Args:
        spans: one row per device, in order, with times from the step's start.
        copies: for each hop between devices, the stage that it came from and how long it took.
        memory: for each device, the most bytes allocated there during the step; None where it isn't counted.

    Example:
        >>> from splitpipe import schedule
        >>> plan = schedule.simulate(schedule.build("1f1b", devices=2, chunks=3))
        >>> len(Step(plan.spans, copies=(), memory=(None, None)).spans)
        2
    """

    spans: tuple[tuple[Span, ...], ...]
    copies: tuple[tuple[int, float], ...]
    memory: tuple[int | None, ...]


def verify_step(step: object, devices: int) -> None:
    """Raises unless the value is a Step that can have run on that number of devices."""
    if not isinstance(step, Step):
        raise TypeError(f"step is {step!r}: expected a Step.")
    for name, is_right in ("spans", _is_row), ("copies", _is_copy), ("memory", _is_memory):
        values = listed(getattr(step, name))
        if values is None or not all(map(is_right, values)):
            raise TypeError(f"{name} is {getattr(step, name)!r}: expected what a Step has.")
    spans = [*chain.from_iterable(step.spans)]
    if not len(step.spans) == len(step.memory) == devices or not spans:
        raise ValueError(
            f"the step has spans of {counted(len(step.spans), 'device')} and memory of {len(step.memory)}: expected "
            f"{devices}, with ops."
        )
    for op, start, end in spans:
        if not -math.inf < real(start) <= real(end) < math.inf:
            raise ValueError(f"{op} goes from {start!r} to {end!r}: expected times in order.")
    for stage, time in step.copies:  # Different clocks may make the time negative.
        if stage < 0 or not math.isfinite(real(time)):
            raise ValueError(f"copies has {(stage, time)!r}: expected a stage and a time.")
    if len(spans) > len({span.op for span in spans}):
        raise ValueError("the step has an op twice: expected each once.")


def _is_row(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(span, Span) for span in value)


def _is_copy(value: object) -> bool:
    return (isinstance(value, tuple) and len(value) == 2
            and isinstance(value[0], int) and isinstance(value[1], (int, float)))


def _is_memory(value: object) -> bool:
    return value is None or isinstance(value, int)


def op_times(steps: Sequence[Step]) -> dict[tuple[Kind, int], list[float]]:
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        for (kind, stage, _), start, end in chain.from_iterable(step.spans):
            times[kind, stage].append(end - start)
    return dict(times)


def op_costs(schedule: Schedule, steps: Sequence[Step], average: Average) -> Costs:
    """The costs that follow from the times of ops and copies, on average: by mean or median.

    A stage's B and W have separate averages. If the stage also has BW, both are scaled so that they add up to the
    average time of a microbatch's backward; if it has only BW, B and W are half of it each.
    """
    times, copies = op_times(steps), [time for step in steps for _, time in step.copies]
    forward = [_average(average, times.get(("F", stage), ())) for stage in range(schedule.stages)]
    backward = [_backward(times, stage, average) for stage in range(schedule.stages)]
    return Costs(forward, [b for b, _ in backward], [w for _, w in backward], _average(average, copies))


def _average(average: Average, values: Sequence[float]) -> float:
    """Clocks of two devices may differ a little, so negative times count as 0."""
    return max(0.0, average(values)) if values else 0.0


def _backward(times: OpTimes, stage: int, average: Average) -> tuple[float, float]:
    split, _, fused = each = [times.get((kind, stage), ()) for kind in ("B", "W", "BW")]
    b, w, both = (_average(average, values) for values in each)
    if not fused:
        return b, w
    whole = (len(split) * (b + w) + len(fused) * both) / (len(split) + len(fused))
    part = b / (b + w) if b + w else 0.5
    return whole * part, whole * (1 - part)
