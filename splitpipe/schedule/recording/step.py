"""One recorded step: the times of its ops, and the costs that follow from them."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Schedule
from splitpipe.schedule.timed import Span

Average = Callable[[Sequence[float]], float]
OpTimes = Mapping[tuple[Kind, int], Sequence[float]]


@dataclass(frozen=True)
class Step:
    """A training step as it ran, with an op at least. Times are in milliseconds."""

    spans: tuple[tuple[Span, ...], ...]  # One row per device, in order, with times from the step's start.
    copies: tuple[tuple[int, float], ...]  # For each hop, the stage that it came from and how long it took.
    memory: tuple[int | None, ...]  # For each device, the most bytes allocated there; None where it isn't counted.


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
