"""Training steps as they ran, each op with its times: a timeline that is measured rather than simulated."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from statistics import fmean, median

from splitpipe.schedule import verdict
from splitpipe.schedule.construct.orders import first
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Schedule, counted
from splitpipe.schedule.timed import Span, TimedSchedule
from splitpipe.schedule.timeline import Timeline, simulate
from splitpipe.schedule.verdict import Step, op_costs


class Recording(Timeline):
    """Recorded training steps as a timeline in milliseconds: what ``splitpipe.record`` yields.

    It shows one step, from its start: of the steps with the most microbatches, the one with the median makespan.
    ``costs()`` uses all steps. Printed, it reports which stage is the bottleneck and where time is lost.

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
        return op_costs(self._planned, self._recorded, median)

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
        return verdict.idle_by_reason(self, self.plan)

    @property
    def memory(self) -> tuple[int | None, ...]:
        """For each device, the most bytes allocated there during a step; None where it isn't counted."""
        columns = zip(*(step.memory for step in self._recorded))
        return tuple(max((size for size in column if size is not None), default=None) for column in columns)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The number of steps, the stage that is the bottleneck, and the reasons for lost time, one sentence each."""
        return (self._steps_in_words(), *verdict.remarks(self, self.plan, self._names))

    def __str__(self) -> str:
        steps = self._recorded
        tables = verdict.stages(self._planned, steps, self._names), verdict.devices(self, self.memory, self._names)
        return "\n\n".join([super().__str__(), *map("\n".join, (*tables, self.remarks))])

    def to_svg(self, path: str | PathLike[str], *others: TimedSchedule) -> None:
        """Writes a picture, like ``Timeline.to_svg``; without ``others``, the plan is drawn below it."""
        super().to_svg(path, *(others or [self.plan]))

    def to_html(self, path: str | PathLike[str], *others: TimedSchedule) -> None:
        """Writes a zoomable page, like ``Timeline.to_html``; without ``others``, the plan is compared with it."""
        super().to_html(path, *(others or [self.plan]))

    # All other properties of a timeline follow from these, which are those of the shown step.

    @property
    def schedule(self) -> Schedule:
        return self._shown[0] if self._steps else self._planned

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        return self._shown[1].spans

    @property
    def _costs(self) -> Costs:
        return op_costs(self._shown[0], [self._shown[1]], fmean)

    @property
    def label(self) -> str:
        return f"{self._name}, recorded (ms)"

    @property
    def work(self) -> tuple[float, ...]:
        """How long each device computed."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

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
