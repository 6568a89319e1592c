"""One recorded step: the times of its ops, and the costs that follow from them."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean

from splitpipe.schedule.costs import Bytes, Costs
from splitpipe.schedule.op import Kind, Schedule
from splitpipe.schedule.timed import Span
from splitpipe.schedule.timeline import Timeline

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


class RecordedStep(Timeline):
    """A recorded step as a timeline: its costs are the means of its ops."""

    def __init__(self, schedule: Schedule, step: Step, bytes: Bytes | None = None) -> None:
        mean = op_costs(schedule, op_times(step), [time for _, time in step.copies], fmean)
        super().__init__(schedule, mean, step.spans, bytes)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """How long each device computed."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Lower bounds for any order of ops with the step's mean times; at most the time that the step took."""
        return {name: min(value, self.makespan) for name, value in super().bounds.items()}


def op_times(*steps: Step) -> dict[tuple[Kind, int], list[float]]:
    """How long each op of a kind and stage took."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        for (kind, stage, _), start, end in chain.from_iterable(step.spans):
            found[kind, stage].append(end - start)
    return dict(found)


def op_costs(schedule: Schedule, times: OpTimes, copies: Sequence[float], average: Average) -> Costs:
    """The costs that follow from these times of ops and copies, on average: by mean or median.

    A stage's B and W have separate averages. If the stage also has BW, both are scaled so that they add up to the
    average time of a microbatch's backward; if it has only BW, B and W are half of it each.
    """
    forward = [_average(average, times.get(("F", stage), ())) for stage in range(schedule.stages)]
    backward = [_backward(times, stage, average) for stage in range(schedule.stages)]
    return Costs(forward, [b for b, _ in backward], [w for _, w in backward], _average(average, copies))


def _average(average: Average, values: Sequence[float]) -> float:
    """Clocks of two devices may differ a little, so negative times count as 0."""
    return max(0.0, average(values)) if values else 0.0


def _backward(times: OpTimes, stage: int, average: Average) -> tuple[float, float]:
    """The costs of B and W in a stage."""
    split, _, fused = each = [times.get((kind, stage), ()) for kind in ("B", "W", "BW")]
    b, w, both = (_average(average, values) for values in each)
    if not fused:
        return b, w
    whole = (len(split) * (b + w) + len(fused) * both) / (len(split) + len(fused))
    part = b / (b + w) if b + w else 0.5
    return whole * part, whole * (1 - part)
