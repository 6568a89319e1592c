"""What recorded steps show: the times of ops, the bottleneck, the reasons for idle time, and what would help."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw import measures
from splitpipe.schedule.op import Kind, Schedule
from splitpipe.schedule.play import OpOrder
from splitpipe.schedule.timed import Span, TimedSchedule

OpTimes = Mapping[tuple[Kind, int], Sequence[float]]
Average = Callable[[Sequence[float]], float]

STAGES, ORDER, COPIES, WAITING = "unbalanced stages", "the schedule's own bubble", "copies", "waiting beyond the plan"
_STANDS_OUT = 1.05  # A bottleneck computes at least this many times as long as the others.
_SMALL = 0.005  # The fraction of a step below which lost time isn't reported.
_LARGE = 0.02  # The fraction of a step from which on lost time gets advice.

ADVICE = {
    ORDER: "It shrinks with more chunks, or with another schedule: splitpipe.schedule.search finds one for "
           "timeline.costs()",
    COPIES: "Cut where activations are small, or use fewer stages per device",
    WAITING: "Longer ops outweigh the time that the host and the copies take: use fewer chunks, or a larger batch",
}


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
    """The costs that follow from ops and copies, on average: by mean or median. See ``Recording.costs``."""
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


def idle_by_reason(step: TimedSchedule, plan: TimedSchedule) -> dict[str, float]:
    """How long a device of the step is idle on average, by reason; ``plan`` is the same ops, simulated.

    The plan is simulated twice more: with equal work on every device, which shows the cost of unequal stages, and also
    without copies, which leaves only the order of ops. Idle time of the step beyond the plan has other reasons.
    """
    schedule = plan.schedule
    times = plan.costs().times(schedule)
    forward, b, w = (sum(times[kind]) / len(set(schedule.placement)) for kind in ("F", "B", "W"))
    even = Costs(forward, b, w, plan.costs().copy)
    order, equal = OpOrder(schedule), even.times(schedule)
    balanced, alone = order.makespan(equal, even.hops(schedule)), order.makespan(equal)
    # Idle time with one reason more each time. Each is at least the one before: if a step took less than its plan, or
    # unequal stages happen to suit the order, less is left for the reasons before them.
    whole = fmean(step.idle)
    planned = max(0.0, min(fmean(plan.idle), whole))
    copied = min(balanced - fmean(plan.work), planned)
    ordered = max(0.0, min(alone - fmean(plan.work), copied))
    copied = max(copied, ordered)
    return {STAGES: planned - copied, ORDER: ordered, COPIES: copied - ordered, WAITING: whole - planned}


def stages(schedule: Schedule, steps: Sequence[Step], names: Sequence[str]) -> list[str]:
    """A table with one line per stage: its device, and the median time of each kind of op and of its hops."""
    times, copies = op_times(steps), [copy for step in steps for copy in step.copies]
    kinds = [kind for kind in measures.MEANING if any(each == kind for each, _ in times)]
    rows = [["stage", "device", *(f"{kind} ms" for kind in kinds), "copy ms"]]
    for stage, device in enumerate(schedule.placement):
        columns = [times.get((kind, stage), ()) for kind in kinds]
        columns.append([time for source, time in copies if source == stage])
        rows.append([str(stage), names[device], *(f"{median(each):.3f}" if each else "-" for each in columns)])
    return measures.aligned(rows, "><" + ">" * (len(kinds) + 1))


def devices(shown: TimedSchedule, memory: Sequence[int | None], names: Sequence[str]) -> list[str]:
    """A table with one line per device: how much of the step it computes, and its peak memory."""
    rows = [["device", "busy", "bubble", "peak memory"]]
    for name, busy, most in zip(names, shown.utilisation, memory):
        size = "-" if most is None else measures.size(most)
        rows.append([name, measures.percent(busy), measures.percent(1 - busy), size])
    return measures.aligned(rows, "<>>>")


def remarks(shown: TimedSchedule, plan: TimedSchedule, names: Sequence[str]) -> list[str]:
    """The stage that is the bottleneck; how much a device computes; and a line for each reason for idle time."""
    whole = shown.makespan
    lost = [(time, reason) for reason, time in idle_by_reason(shown, plan).items()]
    parts = sorted([each for each in lost if each[0] > _SMALL * whole > 0], reverse=True)
    computes = f"Of the step's {whole:.4g} ms, a device computes {fmean(shown.work):.4g} ms on average"
    lines = [_bottleneck(shown, names), f"{computes}; the rest is lost:" if parts else f"{computes}."]
    for time, reason in parts:
        advice = ADVICE[reason] if reason in ADVICE else _move(shown, plan, names)
        line = f"{time:.4g} ms ({time / whole:.1%}) to {reason}"
        lines.append(f"{line}. {advice}." if time > _LARGE * whole else f"{line}.")
    return lines


def _bottleneck(shown: TimedSchedule, names: Sequence[str]) -> str:
    busy = shown.utilisation
    most, device = max(busy), busy.index(max(busy))
    others = busy[:device] + busy[device + 1:]
    if not others:
        return f"There is one device, which computes {most:.0%} of the step."
    if most <= _STANDS_OUT * fmean(others):
        ends = dict.fromkeys([f"{min(busy):.0%}", f"{most:.0%}"])
        return f"No stage is the bottleneck: the devices compute {' to '.join(ends)} of the step."
    *more, last = [str(stage) for stage, place in enumerate(shown.schedule.placement) if place == device]
    which = f"Stages {', '.join(more)} and {last}" if more else f"Stage {last}"
    verb, whose = ("are", "their") if more else ("is", "its")
    rest = f"the other {others[0]:.0%}" if len(others) == 1 else f"the others {fmean(others):.0%} on average"
    return f"{which} on {names[device]} {verb} the bottleneck: {whose} device computes {most:.0%} of the step, {rest}."


def _move(shown: TimedSchedule, plan: TimedSchedule, names: Sequence[str]) -> str:
    """The advice to move a layer to the less busy neighbour of the busiest device."""
    placement, times = plan.schedule.placement, plan.costs().times(plan.schedule)
    took = [forward + backward for forward, backward in zip(times["F"], times["BW"])]
    device = max(range(len(shown.work)), key=lambda each: shown.work[each])
    last = len(placement) - 1
    ways = [  # Never empty: two devices with stages have adjacent stages.
        (shown.work[placement[target]], -took[stage], stage, target)
        for stage in range(last + 1) if placement[stage] == device
        for target in (stage - 1, stage + 1) if 0 <= target <= last and placement[target] != device
    ]
    *_, stage, target = min(ways)
    home = placement[target]
    computes = f"{shown.utilisation[home]:.0%}"
    return f"Move a layer from stage {stage} to stage {target} on {names[home]}, which computes {computes}"
