"""Training steps as they ran: a timeline that is measured rather than simulated, and the reasons for idle time."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean, median

from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw import measures
from splitpipe.schedule.op import Kind, Schedule, counted
from splitpipe.schedule.play import OpOrder
from splitpipe.schedule.timed import Span, TimedSchedule
from splitpipe.schedule.timeline import Timeline, simulate

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


class Recording(Timeline):
    """Recorded training steps as a timeline in milliseconds: what ``splitpipe.record`` yields.

    It shows one step, from its start: of the steps with the most microbatches, the one with the median makespan.
    ``costs()`` uses all steps. Printed, it reports which stage is the bottleneck and where time is lost. A picture
    shows the plan below it, unless other timelines are drawn with it.

    Attributes:
        devices: the names of the devices.

    Raises:
        RuntimeError: a property that needs a step is read before one was recorded.

    Example:
        >>> from splitpipe import schedule
        >>> recording = Recording(schedule.build("1f1b", 2, 3), devices=("cuda:0", "cuda:1"))
        >>> recording.steps, recording.devices
        (0, ('cuda:0', 'cuda:1'))
    """

    def __init__(self, schedule: Schedule, devices: Sequence[str] = ()) -> None:
        names = tuple(devices) or tuple(f"device {device}" for device in range(schedule.devices))
        self.devices = names
        # Made unique, for sentences and tables.
        self._names = [x if names.count(x) == 1 else f"{x} (device {at})" for at, x in enumerate(names)]
        self._planned, self._name = schedule, schedule.name or "schedule"
        self._steps: list[Step] = []

    def add(self, step: Step) -> None:
        """Adds a step as it ran."""
        self._steps.append(step)
        vars(self).pop("_shown", None)

    @property
    def steps(self) -> int:
        """The number of recorded steps."""
        return len(self._steps)

    def costs(self) -> Costs:
        """The times of ops in all steps, for ``simulate`` and ``search``: the median for each kind and stage.

        If a stage has no separate B, its B and W are half of its BW each. If it has both, B and W add up to the mean
        time of a microbatch's backward, in their own ratio. A copy is the median of all hops.
        """
        return _op_costs(self._planned, self._recorded, median)

    @property
    def plan(self) -> Timeline:
        """The shown step as it would be if every op took its median time and nothing else took time."""
        return simulate(replace(self._shown[0], name=f"{self._name}, planned (ms)"), self.costs())

    @property
    def losses(self) -> dict[str, float]:
        """The average milliseconds in which a device doesn't compute, by reason; their sum is the mean of ``idle``.

        * "unbalanced stages": what equal work on all devices would save in the plan;
        * "the schedule's own bubble": what remains with equal work and without copies;
        * "copies": what the plan would save without them;
        * "waiting beyond the plan": for the host, for longer copies, for ops that took longer than their median.

        None is below 0: if a step took less time than its plan, there is less to divide.
        """
        return _idle_by_reason(self, self.plan)

    @property
    def memory(self) -> tuple[int | None, ...]:
        """For each device, the most bytes allocated there during a step; None where it isn't counted."""
        columns = zip(*(step.memory for step in self._recorded))
        return tuple(max((size for size in column if size is not None), default=None) for column in columns)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The number of steps, the stage that is the bottleneck, and the reasons for lost time, one sentence each."""
        plan, whole = self.plan, self.makespan
        lost = [(time, reason) for reason, time in self.losses.items()]
        parts = sorted([each for each in lost if each[0] > _SMALL * whole > 0], reverse=True)
        computes = f"Of the step's {whole:.4g} ms, a device computes {fmean(self.work):.4g} ms on average"
        lines = [self._steps_in_words(), _bottleneck(self, self._names)]
        lines.append(f"{computes}; the rest is lost:" if parts else f"{computes}.")
        for time, reason in parts:
            advice = ADVICE[reason] if reason in ADVICE else _move(self, plan, self._names)
            line = f"{time:.4g} ms ({time / whole:.1%}) to {reason}"
            lines.append(f"{line}. {advice}." if time > _LARGE * whole else f"{line}.")
        return tuple(lines)

    def __str__(self) -> str:
        steps = self._recorded
        tables = _stages(self._planned, steps, self._names), _devices(self, self.memory, self._names)
        return "\n\n".join([super().__str__(), *map("\n".join, (*tables, self.remarks))])

    def _beside(self, others: Sequence[TimedSchedule]) -> list[TimedSchedule]:
        return [self, *(others or [self.plan])]

    # All other properties of a timeline follow from these, which are those of the shown step.

    @property
    def schedule(self) -> Schedule:
        return self._shown[0] if self._steps else self._planned

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        return self._shown[1].spans

    @property
    def _costs(self) -> Costs:
        return _op_costs(self._shown[0], [self._shown[1]], fmean)

    @property
    def label(self) -> str:
        return f"{self._name}, recorded (ms)"

    @property
    def bounds(self) -> dict[str, float]:
        """Lower bounds for any order of ops with the step's mean times; at most the time that the step took."""
        return {name: min(value, self.makespan) for name, value in super().bounds.items()}

    def __repr__(self) -> str:
        return f"Recording({self._name!r}, {counted(self.steps, 'step')})"

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def _recorded(self) -> list[Step]:
        if not self._steps:
            raise RuntimeError(
                "nothing was recorded: expected a training step, loss = model(x, target=y), inside `with "
                "splitpipe.record(model) as timeline:`, and the timeline to be used after it."
            )
        return self._steps

    @property
    def _whole(self) -> list[Step]:
        sizes = [sum(map(len, step.spans)) for step in self._recorded]
        return [step for step, size in zip(self._recorded, sizes) if size == max(sizes)]

    @cached_property
    def _shown(self) -> tuple[Schedule, Step]:
        """The shown step, and the schedule of its microbatches."""
        steps = sorted(self._whole, key=lambda step: max(row[-1].end for row in step.spans if row))
        step = steps[(len(steps) - 1) // 2]
        microbatches = 1 + max(span.op.microbatch for row in step.spans for span in row)
        return first(self._planned, microbatches), step

    def _steps_in_words(self) -> str:
        if self.steps == 1:
            return "One step was recorded."
        whole = len(self._whole)
        others = "" if whole == self.steps else f" of {whole}; the others have fewer microbatches, and count for costs"
        return f"{self.steps} steps were recorded; this is the one with the median makespan{others}."


def _op_times(steps: Sequence[Step]) -> dict[tuple[Kind, int], list[float]]:
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        for (kind, stage, _), start, end in chain.from_iterable(step.spans):
            times[kind, stage].append(end - start)
    return dict(times)


def _op_costs(schedule: Schedule, steps: Sequence[Step], average: Average) -> Costs:
    """The costs that follow from ops and copies, on average: by mean or median. See ``Recording.costs``."""
    times, copies = _op_times(steps), [time for step in steps for _, time in step.copies]
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


def _idle_by_reason(step: TimedSchedule, plan: TimedSchedule) -> dict[str, float]:
    """How long a device of the step is idle on average, by reason; ``plan`` is the same ops, simulated.

    The plan is simulated twice more: with equal work on every device, which shows the cost of unequal stages, and also
    without copies, which leaves only the order of ops. Idle time of the step beyond the plan has other reasons.
    """
    schedule = plan.schedule
    times = plan.costs().times(schedule)
    forward, b, w = (sum(times[kind]) / len(set(schedule.placement)) for kind in ("F", "B", "W"))
    even = Costs(forward, b, w, plan.costs().copy)
    order = OpOrder(schedule)
    balanced, alone = order.makespan(even), order.makespan(replace(even, copy=0))
    # Idle time with one reason more each time. Each is at least the one before: if a step took less than its plan, or
    # unequal stages happen to suit the order, less is left for the reasons before them.
    whole = fmean(step.idle)
    planned = max(0.0, min(fmean(plan.idle), whole))
    copied = min(balanced - fmean(plan.work), planned)
    ordered = max(0.0, min(alone - fmean(plan.work), copied))
    copied = max(copied, ordered)
    return {STAGES: planned - copied, ORDER: ordered, COPIES: copied - ordered, WAITING: whole - planned}


def _stages(schedule: Schedule, steps: Sequence[Step], names: Sequence[str]) -> list[str]:
    """A table with one line per stage: its device, and the median time of each kind of op and of its hops."""
    times, copies = _op_times(steps), [copy for step in steps for copy in step.copies]
    kinds = [kind for kind in measures.MEANING if any(each == kind for each, _ in times)]
    rows = [["stage", "device", *(f"{kind} ms" for kind in kinds), "copy ms"]]
    for stage, device in enumerate(schedule.placement):
        columns = [times.get((kind, stage), ()) for kind in kinds]
        columns.append([time for source, time in copies if source == stage])
        rows.append([str(stage), names[device], *(f"{median(each):.3f}" if each else "-" for each in columns)])
    return measures.aligned(rows, "><" + ">" * (len(kinds) + 1))


def _devices(shown: TimedSchedule, memory: Sequence[int | None], names: Sequence[str]) -> list[str]:
    """A table with one line per device: how much of the step it computes, and its peak memory."""
    rows = [["device", "busy", "bubble", "peak memory"]]
    for name, busy, most in zip(names, shown.utilisation, memory):
        size = "-" if most is None else measures.size(most)
        rows.append([name, measures.percent(busy), measures.percent(1 - busy), size])
    return measures.aligned(rows, "<>>>")


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
