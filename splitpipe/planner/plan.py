"""``Plan``: how to cut and run a model, and what that is predicted to take."""
from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from splitpipe.checks import verify_module
from splitpipe.pipe import SplitPipe
from splitpipe.planner import serialize
from splitpipe.planner.comparison import Comparison, compared
from splitpipe.schedule.construct.library import SCHEDULES, build, variants
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw.measures import aligned, percent, size
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.schedule.timeline import Timeline, simulate
from splitpipe.schedule.words import counted

#: Fields that JSON has a form for.
_PLAIN = (
    "balance", "devices", "chunks", "checkpoint", "way", "dropin", "step_time", "peak_bytes", "layers",
)


@dataclass(frozen=True)
class RunnerUp:
    """Another way to run the model, and why it was not chosen.

    Attributes:
        way: schedule, microbatches, and what is checkpointed.
        balance: number of layers of each stage.
        step_time: predicted, in milliseconds.
        peak_bytes: predicted, of each device.
        why: it lost.
    """

    way: str
    balance: tuple[int, ...]
    step_time: float
    peak_bytes: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Plan:
    """How to cut and run a model on some devices: what ``splitpipe.plan`` gives.

    Attributes:
        balance: number of layers of each stage.
        devices: a row of the schedule each, in order.
        placement: the device of each stage, as a number of ``devices``.
        chunks: number of microbatches.
        checkpoint: which microbatches are checkpointed.
        schedule: the order of the ops on each device.
        way: the schedule's name and options, microbatches, and what is checkpointed.
        dropin: whether autograd goes backward after all of forward: there was no ``loss_fn``.
        step_time: predicted, of forward and backward of a batch, in milliseconds.
        costs: predicted, of the stages, in milliseconds.
        peak_bytes: predicted, of each device: parameters, gradients, the optimizer's state, activations, and the
            workspaces of matrix products.
        memory: bytes that there are on each device; infinite if nobody counts.
        layers: names of the module's layers.
        runners_up: other ways, and why they were not chosen.
        loss_fn: that was given to ``splitpipe.plan``; None in a plan that was read from a file.
        note: to be printed with it.

    Raises:
        TypeError: a field is of a wrong type.
        ValueError: a field has a wrong value, or does not go with the schedule.

    Example:
        >>> from torch import nn, randn
        >>> import splitpipe
        >>> module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> plan = splitpipe.plan(module, randn(8, 8), target=randn(8, 2), loss_fn=nn.functional.mse_loss,
        ...                       devices=["cpu", "cpu"], seconds=0.1)
        >>> sum(plan.balance), len(plan.devices)
        (3, 2)
        >>> model = plan.apply(module)
        >>> loss = model(randn(8, 8), target=randn(8, 2))
    """

    balance: tuple[int, ...]
    devices: tuple[str, ...]
    chunks: int
    checkpoint: str
    schedule: Schedule
    way: str
    dropin: bool
    step_time: float
    costs: Costs
    peak_bytes: tuple[int, ...]
    memory: tuple[float, ...]
    layers: tuple[str, ...]
    runners_up: tuple[RunnerUp, ...] = ()
    loss_fn: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    # What the devices were given as: streams have no name.
    given: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    note: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        serialize.verify(self, serialize.FIELDS)
        for other in self.runners_up:
            if not isinstance(other, RunnerUp):
                raise TypeError(f"runners_up has {other!r}: expected RunnerUps.")
            serialize.verify(other, serialize.OTHERS)
        each = len(self.devices), len(self.peak_bytes), len(self.memory)
        if len(self.balance) != self.schedule.stages or each != (self.schedule.devices,) * 3:
            raise ValueError(
                f"found {counted(len(self.balance), 'stage')} and names, peaks and memory of "
                f"{', '.join(map(str, each))} of the devices: expected the schedule's "
                f"{counted(self.schedule.stages, 'stage')}, and all of its {counted(self.schedule.devices, 'device')}."
            )
        if sum(self.balance) != len(self.layers) or 0 in self.balance:
            raise ValueError(
                f"balance {list(self.balance)} sums to another number than {counted(len(self.layers), 'layer')}, or "
                "has a 0: expected how many layers each stage has."
            )
        if self.chunks < 1 or len(self.given) not in (0, len(self.devices)):
            raise ValueError(
                f"found {counted(self.chunks, 'chunk')} and {counted(len(self.given), 'device')} in given: expected at "
                f"least one microbatch, and none or all of the plan's {counted(len(self.devices), 'device')}."
            )
        simulate(self.schedule, self.costs)

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.schedule.placement

    @cached_property
    def timeline(self) -> Timeline:
        """The step as it is predicted, to be drawn: each op with its times, in milliseconds."""
        return simulate(self.schedule, self.costs)

    @property
    def bubble(self) -> float:
        """The part of the step that a device is predicted to be idle, on average."""
        return max(0.0, 1 - sum(self.timeline.work) / len(self.devices) / self.step_time) if self.step_time else 0.0

    def arguments(self, loss_fn: Callable[..., Any] | None = None) -> dict[str, Any]:
        """The arguments of ``SplitPipe`` but the module.

        Args:
            loss_fn: of the schedule; None: that which ``splitpipe.plan`` was given.

        Raises:
            TypeError: ``loss_fn`` can't be called.
            ValueError: a schedule was planned, and there is no ``loss_fn``: a plan that was read has none. Or it was
                made for a ``torch.Stream``, and read.
        """
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is {loss_fn!r}: expected a function of output and target.")
        found: dict[str, Any] = {
            "balance": list(self.balance), "devices": self._devices(), "chunks": self.chunks,
            "checkpoint": self.checkpoint,
        }
        if self.dropin:
            return found
        loss_fn = self.loss_fn if loss_fn is None else loss_fn
        if loss_fn is None:
            raise ValueError(
                f"the plan is {self.way}, which goes backward itself, and a plan that was read from a file has no "
                "loss_fn: expected plan.arguments(loss_fn=criterion)."
            )
        return {**found, "schedule": self._named(), "loss_fn": loss_fn}

    def _devices(self) -> list[Any]:
        if self.given:
            return list(self.given)
        streams = [name for name in self.devices if " " in name]
        if streams:
            raise ValueError(
                f"the plan was made for {', '.join(streams)}, and a stream can't be read: expected "
                "dataclasses.replace(plan, given=(...)) with the streams, one for each of plan.devices."
            )
        return list(self.devices)

    def _named(self) -> str | Schedule:
        """The schedule by its name, if that is all there is to it."""
        schedule = self.schedule
        try:
            alike = build(schedule.name, len(self.devices), self.chunks) == schedule
        except ValueError:
            alike = False
        return schedule.name if alike else schedule

    def apply(self, module: Any, loss_fn: Callable[..., Any] | None = None) -> SplitPipe:
        """The module as a SplitPipe that runs so.

        Args:
            module: that was planned for.
            loss_fn: as of ``arguments``.

        Raises:
            TypeError: as of ``arguments``, or as ``SplitPipe`` raises it.
            ValueError: as of ``arguments``, or the module has another number of layers.
        """
        verify_module(module)
        if len(module) != len(self.layers):
            raise ValueError(
                f"the module has {counted(len(module), 'layer')}, and the plan was made for {len(self.layers)}: "
                "expected the same."
            )
        return SplitPipe(module, **self.arguments(loss_fn))

    def compare(self, timeline: Recording) -> Comparison:
        """The predictions beside a recording, for the step and each stage.

        Args:
            timeline: of training steps of ``plan.apply(module)``: ``with model.record() as timeline: ...``.

        Raises:
            TypeError: there is no recording.
            ValueError: another schedule was recorded.
            RuntimeError: nothing was.
        """
        if not isinstance(timeline, Recording):
            raise TypeError(f"timeline is {timeline!r}: expected what `with model.record() as timeline:` gives.")
        return compared(self.timeline, self.step_time, self.peak_bytes, timeline)

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes the plan, without ``loss_fn``, to the file ``path``; ``from_json`` reads it.

        Raises:
            TypeError: the path is none.
            OSError: the file can't be written.
        """
        path = fspath(path)
        own = {name: getattr(self, name) for name in _PLAIN}
        more = {
            "schedule": serialize.of_schedule(self.schedule),
            "costs": asdict(self.costs),
            "memory": serialize.of_sizes(self.memory),
            "runners_up": [asdict(other) for other in self.runners_up],
        }
        text = json.dumps({"splitpipe plan": serialize.FORM, **own, **more}, indent=1)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Plan:
        """Reads the plan that ``to_json`` wrote to the file ``path``.

        Raises:
            TypeError: the path is none.
            ValueError: the file holds no plan.
            OSError: the file can't be read.
        """
        path = fspath(path)
        try:
            text = json.loads(Path(path).read_text(encoding="utf-8"))
            if text["splitpipe plan"] != serialize.FORM:
                raise ValueError(f"it has form {text['splitpipe plan']}, and this version reads {serialize.FORM}")
            own = {name: _tuple(text[name]) for name in _PLAIN}
            others = [{name: _tuple(value) for name, value in other.items()} for other in text["runners_up"]]
            return cls(
                **own,
                schedule=serialize.schedule_of(text["schedule"]),
                costs=serialize.costs_of(text["costs"]),
                memory=serialize.sizes_of(text["memory"]),
                runners_up=tuple(RunnerUp(**other) for other in others),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} holds no plan: {what}. Expected a file that Plan.to_json wrote.") from error

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes a page with the predicted step, to zoom into, to the file ``path``. See ``Timeline.to_html``.

        Raises:
            TypeError: the path is none.
            OSError: the file can't be written.
        """
        self.timeline.to_html(path)

    def __str__(self) -> str:
        parts = self._head(), self._stages(), self._memory(), self._others(), [self.note] if self.note else []
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _head(self) -> list[str]:
        return [
            f"{self.way} on {counted(len(self.devices), 'device')}: {self.step_time:.4g} ms a step predicted, "
            f"{percent(self.bubble)} of it bubble",
            self._code(),
        ]

    def _code(self) -> str:
        """The call that makes the model, to be pasted where ``module`` and ``loss_fn`` are what was planned for."""
        loss = "" if self.dropin else ", loss_fn=loss_fn"
        schedule = None if self.dropin else self._schedule_code()
        if schedule == "" or any(" " in name for name in self.devices):  # A stream, or a schedule without a name.
            return f"model = plan.apply(module{loss})"
        shown = {"balance": list(self.balance), "devices": list(self.devices), "chunks": self.chunks,
                 "checkpoint": self.checkpoint}
        listed = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"model = splitpipe.SplitPipe(module, {listed}{f', schedule={schedule}' if schedule else ''}{loss})"

    def _schedule_code(self) -> str:
        """The schedule as an argument is written; "" if it is no named one."""
        named = self._named()
        if isinstance(named, str):
            return repr(named)
        devices = len(self.devices)
        if self.schedule.name in SCHEDULES:
            for options in variants(self.schedule.name, devices, [self.schedule.stages // devices]):
                with suppress(ValueError):
                    if build(self.schedule.name, devices, self.chunks, **options) == self.schedule:
                        given = "".join(f", {name}={value!r}" for name, value in options.items())
                        return f"splitpipe.schedule.build({self.schedule.name!r}, {devices}, {self.chunks}{given})"
        return ""

    def _stages(self) -> list[str]:
        times = self.costs.times(self.schedule)
        rows = [["stage", "device", "layers", "F ms", "B ms", "W ms"]]
        start = 0
        for stage, count in enumerate(self.balance):
            names = self.layers[start:start + count]
            start += count
            shown = names[0] if count == 1 else f"{names[0]} to {names[-1]}"
            each = [f"{of[stage]:.3f}" for of in (times["F"], times["B"], times["W"])]
            rows.append([str(stage), self.devices[self.placement[stage]], f"{shown} ({count})", *each])
        return aligned(rows, "><<>>>")

    def _memory(self) -> list[str]:
        rows = [["device", "peak", "of"]]
        for name, peak, room in zip(self.devices, self.peak_bytes, self.memory):
            rows.append([name, size(peak), size(int(room)) if room < float("inf") else "-"])
        return aligned(rows, "<>>")

    def _others(self) -> list[str]:
        if not self.runners_up:
            return []
        rows = [["not chosen", "ms", "peak", "why"]]
        for other in self.runners_up:
            rows.append([other.way, f"{other.step_time:.4g}", size(max(other.peak_bytes)), other.why])
        return aligned(rows, "<>><")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
