"""Training steps as they ran, each op with its times: a timeline that is measured rather than simulated."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from statistics import median
from typing import Any

from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Bytes, Costs, real
from splitpipe.schedule.op import Kind, Schedule, listed, verify
from splitpipe.schedule.plurals import counted
from splitpipe.schedule.recording import verdict
from splitpipe.schedule.recording.step import RecordedStep, Step, op_costs, op_times
from splitpipe.schedule.timed import Span, TimedSchedule
from splitpipe.schedule.timeline import Timeline, simulate


class Recording(Timeline):
    """Recorded training steps as a timeline in milliseconds: what ``SplitPipe.record`` yields.

    It shows one step, from its start: of the steps with the most microbatches, the one with the median makespan.
    ``costs()`` uses all steps. Printed, it reports which stage is the bottleneck and where time is lost.

    Args:
        schedule: the schedule that was run.
        devices: the devices' names. Default: they are numbered.

    Attributes:
        devices: the names of the devices.
        held: the measured bytes of activations, for ``peak_bytes``; None if they weren't measured.
        kept: for each stage, the bytes that W needed per microbatch, which may be more than F saved.
        saved: for each stage, the bytes of each storage that F saved for a microbatch, those of parameters among them.

    Raises:
        TypeError: ``schedule`` isn't a Schedule, or a name isn't a string.
        ValueError: there are more or fewer names than devices.
        RuntimeError: a property that needs a step is read before one was recorded.

    Example:
        >>> from splitpipe import schedule
        >>> plan = schedule.simulate(schedule.build("1f1b", 2, 3), schedule.Costs(forward=[1, 3]))
        >>> recording = Recording(plan.schedule, devices=("cuda:0", "cuda:1"))
        >>> recording.add(Step(plan.spans, copies=(), memory=(None, None)))
        >>> print(recording)
        1f1b, recorded (ms): 2 devices, 3 microbatches
        ...
        Stage 1 on cuda:1 is the bottleneck: its device computes 83% of the step, the other 50%.
        ...
    """

    def __init__(self, schedule: Schedule, devices: Sequence[str] = ()) -> None:
        verify(schedule)
        given = listed(devices)
        if given is None or not all(isinstance(name, str) for name in given):
            raise TypeError(f"devices is {devices!r}: expected a list of strings, the names of the devices.")
        names = tuple(given) or tuple(f"device {device}" for device in range(schedule.devices))
        if len(names) != schedule.devices:
            raise ValueError(f"found {counted(len(names), 'name')}, {', '.join(names)}: expected one for each of "
                             f"the schedule's {counted(schedule.devices, 'device')}.")
        self.devices = names
        self.held: Bytes | None = None
        self.kept: tuple[int, ...] = ()
        self.saved: tuple[Mapping[Any, int], ...] = ()
        self._planned = schedule
        self._steps: list[Step] = []
        self._latest: _Summary | None = None

    def add(self, step: Step) -> None:
        """Adds a step.

        Args:
            step: the step as it ran.

        Raises:
            TypeError: ``step`` isn't a Step, or a value in it has a wrong type.
            ValueError: it has a different number of devices, or no ops.
        """
        _verify(step, self._planned.devices)
        self._steps.append(step)

    @property
    def steps(self) -> int:
        """The number of recorded steps."""
        return len(self._steps)

    def costs(self) -> Costs:
        """The times of ops in all steps, for ``simulate`` and ``search``: the median for each kind and stage.

        If a stage has no separate B, its B and W are half of its BW each. If it has both, B and W add up to the mean
        time of a microbatch's backward, in their own ratio. A copy is the median of all hops.
        """
        return self._summary.costs

    @property
    def plan(self) -> Timeline:
        """The shown step as it would be if every op took its median time and nothing else took time."""
        return self._summary.plan

    @property
    def losses(self) -> dict[str, float]:
        """The average milliseconds in which a device doesn't compute, by reason; their sum is the mean of ``idle``.

        * "unbalanced stages": what equal work on all devices would save in the plan;
        * "the schedule's own bubble": what remains with equal work and without copies;
        * "copies": what the plan would save without them;
        * "waiting beyond the plan": for the host, for longer copies, for ops that took longer than their median.

        None is below 0: if a step took less time than its plan, there is less to divide.
        """
        return dict(self._summary.losses)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The fraction of the step in which each device computes."""
        return tuple(work / self.makespan if self.makespan else 0.0 for work in self.work)

    @property
    def memory(self) -> tuple[int | None, ...]:
        """For each device, the most bytes allocated there during a step; None where it isn't counted."""
        return self._summary.memory

    @property
    def remarks(self) -> tuple[str, ...]:
        """The number of steps, the stage that is the bottleneck, and the reasons for lost time, one sentence each."""
        found = self._summary
        return (found.counted, *verdict.remarks(found.step, found.plan, self._names, found.losses))

    def __str__(self) -> str:
        found = self._summary
        stages = verdict.stages(self._planned, found.times, found.copies, self._names)
        devices = verdict.devices(found.step, found.memory, self._names)
        return "\n\n".join([super().__str__(), *map("\n".join, (stages, devices, self.remarks))])

    def to_svg(self, path: str | PathLike[str], *others: TimedSchedule) -> None:
        """Writes a picture, like ``Timeline.to_svg``; without ``others``, the plan is drawn below it."""
        super().to_svg(path, *(others or [self.plan]))

    def to_html(self, path: str | PathLike[str], *others: TimedSchedule) -> None:
        """Writes a zoomable page, like ``Timeline.to_html``; without ``others``, the plan is compared with it."""
        super().to_html(path, *(others or [self.plan]))

    # All other properties of a timeline follow from these, which are those of the shown step.

    @property
    def schedule(self) -> Schedule:
        return self._summary.step.schedule if self._steps else self._planned

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        return self._summary.step.spans

    @property
    def bytes(self) -> Bytes | None:
        return self._summary.bytes

    @property
    def label(self) -> str:
        return f"{self._planned.name or 'schedule'}, recorded (ms)"

    @property
    def work(self) -> tuple[float, ...]:
        return self._summary.step.work

    @property
    def bounds(self) -> dict[str, float]:
        """Lower bounds for any order of ops with the step's mean times; see ``Timeline.bounds``."""
        return self._summary.step.bounds

    def __repr__(self) -> str:
        return f"Recording({self._planned.name or 'schedule'!r}, {counted(self.steps, 'step')})"

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def _names(self) -> list[str]:
        """The names of the devices, made unique."""
        names = self.devices
        return [name if names.count(name) == 1 else f"{name} (device {at})" for at, name in enumerate(names)]

    @property
    def _summary(self) -> _Summary:
        if not self._steps:
            raise RuntimeError(
                "nothing was recorded: expected a training step, loss = model(x, target=y), inside `with "
                "model.record() as timeline:`, and the timeline to be used after it."
            )
        found = self._latest
        if found is None or found.steps != len(self._steps) or found.bytes != self.held:
            found = self._latest = _summarized(self._planned, self._steps, self.held)
        return found


def _is_copy(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], int) and isinstance(value[1], (int, float))


def _verify(step: Step, devices: int) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"step is {step!r}: expected a Step.")
    rows, copies, memory = listed(step.spans), listed(step.copies), listed(step.memory)
    if rows is None or not all(isinstance(row, (tuple, list)) for row in rows):
        raise TypeError(f"spans is {step.spans!r}: expected one row of spans per device.")
    if not all(isinstance(span, Span) for row in rows for span in row):
        raise TypeError(f"spans is {step.spans!r}: expected spans, each an op with its start and end.")
    if copies is None or not all(map(_is_copy, copies)):
        raise TypeError(f"copies is {step.copies!r}: expected pairs of a stage and a time.")
    if memory is None or not all(most is None or isinstance(most, int) for most in memory):
        raise TypeError(f"memory is {step.memory!r}: expected one number of bytes per device, or None.")
    if not len(rows) == len(memory) == devices or not any(rows):
        raise ValueError(
            f"the step has spans of {counted(len(rows), 'device')} and memory of {len(memory)}: expected "
            f"{devices}, with ops."
        )
    for span in (span for row in rows for span in row):
        if not -math.inf < real(span.start) <= real(span.end) < math.inf:
            raise ValueError(f"{span.op} goes from {span.start!r} to {span.end!r}: expected times in order.")
    for stage, time in copies:
        if stage < 0 or not math.isfinite(real(time)):  # Different clocks may make the time negative.
            raise ValueError(f"copies has {(stage, time)!r}: expected a stage and a time.")
    ops = [span.op for row in rows for span in row]
    if len({*ops}) < len(ops):
        raise ValueError(f"the step has {counted(len(ops) - len({*ops}), 'op')} twice: expected each once.")


@dataclass(frozen=True)
class _Summary:
    """A recording's results, which follow from its steps and from the bytes that activations take."""

    steps: int
    bytes: Bytes | None
    step: RecordedStep  # The one shown.
    times: dict[tuple[Kind, int], list[float]]
    copies: list[tuple[int, float]]
    costs: Costs
    plan: Timeline
    losses: dict[str, float]
    memory: tuple[int | None, ...]
    counted: str


def _summarized(planned: Schedule, steps: Sequence[Step], bytes: Bytes | None) -> _Summary:
    sizes = [sum(map(len, step.spans)) for step in steps]
    whole = [step for step, size in zip(steps, sizes) if size == max(sizes)]
    whole.sort(key=lambda step: max(row[-1].end for row in step.spans if row))
    median_step = whole[(len(whole) - 1) // 2]
    microbatches = 1 + max(span.op.microbatch for row in median_step.spans for span in row)
    shown = RecordedStep(first(planned, microbatches), median_step, bytes)
    times, copies = op_times(*steps), [copy for step in steps for copy in step.copies]
    costs = op_costs(planned, times, [time for _, time in copies], median)
    name = f"{planned.name or 'schedule'}, planned (ms)"
    plan = simulate(Schedule(shown.schedule.rows, shown.schedule.placement, name), costs, bytes)
    most = (
        max((size for size in column if size is not None), default=None)
        for column in zip(*(step.memory for step in steps))
    )
    return _Summary(
        steps=len(steps),
        bytes=bytes,
        step=shown,
        times=times,
        copies=copies,
        costs=costs,
        plan=plan,
        losses=verdict.idle_by_reason(shown, plan),
        memory=tuple(most),
        counted=_counted(len(steps), len(steps) - len(whole)),
    )


def _counted(steps: int, short: int) -> str:
    """The number of steps, and which one is shown, in words."""
    if steps == 1:
        return "One step was recorded."
    if not short:
        return f"{steps} steps were recorded; this is the one with the median makespan."
    return (f"{steps} steps were recorded, {short} of them with fewer microbatches, which only count for the costs. "
            "This is the one with the median makespan of the others.")
