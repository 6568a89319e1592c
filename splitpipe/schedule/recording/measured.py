"""What a step was measured to take: the costs of its ops, and the step as a played schedule."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean

from splitpipe.schedule.costs import Bytes, Costs
from splitpipe.schedule.op import Kind, Schedule
from splitpipe.schedule.played import Played, Span

Average = Callable[[Sequence[float]], float]
#: The source stage of each hop between devices, and how long it took.
Copies = Iterable[tuple[int, float]]
Lengths = Mapping[tuple[Kind, int], Sequence[float]]


class Shown(Played):
    """One recorded step: its costs are the means of its own ops.

    Args:
        schedule: of the ops that ran, in the order planned.
        spans: a row for each device, in order.
        copies: of the step.
        bytes: what activations take; None if nobody measured.
    """

    def __init__(
        self, schedule: Schedule, spans: tuple[tuple[Span, ...], ...], copies: Copies, bytes: Bytes | None = None
    ) -> None:
        super().__init__(schedule, costs(schedule, lengths(spans), [time for _, time in copies], fmean), spans, bytes)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """How long each device computed."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @cached_property
    def bounds(self) -> dict[str, float]:
        """What no order of ops of the step's mean times gets below; at most what the step took."""
        return {name: min(value, self.makespan) for name, value in super().bounds.items()}


def lengths(*steps: Sequence[Sequence[Span]]) -> dict[tuple[Kind, int], list[float]]:
    """How long each op of a kind and stage took."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rows in steps:
        for row in rows:
            for (kind, stage, _), start, end in row:
                found[kind, stage].append(end - start)
    return dict(found)


def costs(schedule: Schedule, lengths: Lengths, copies: Sequence[float], average: Average) -> Costs:
    """The costs that these measurements say, on average.

    A stage's B and W have their own average. Where the stage also has BW, both are scaled, so that a microbatch's
    backward takes what it took on average; where it has nothing but BW, B and W are half of it each.

    Args:
        schedule: whose stages they are.
        lengths: of the ops.
        copies: how long hops between devices took.
        average: of several measurements: their mean or their median.
    """
    forward = [_average(average, lengths.get(("F", stage), ())) for stage in range(schedule.stages)]
    backward = [_backward(lengths, stage, average) for stage in range(schedule.stages)]
    return Costs(forward, [b for b, _ in backward], [w for _, w in backward], _average(average, copies))


def _average(average: Average, values: Sequence[float]) -> float:
    """Clocks of two devices may differ by a little, but nothing takes less than no time."""
    return max(0.0, average(values)) if values else 0.0


def _backward(lengths: Lengths, stage: int, average: Average) -> tuple[float, float]:
    """The costs of B and W in a stage."""
    split, _, fused = each = [lengths.get((kind, stage), ()) for kind in ("B", "W", "BW")]
    b, w, both = (_average(average, values) for values in each)
    if not fused:
        return b, w
    whole = (len(split) * (b + w) + len(fused) * both) / (len(split) + len(fused))
    part = b / (b + w) if b + w else 0.5
    return whole * part, whole * (1 - part)
