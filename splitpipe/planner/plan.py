"""``Plan``: how to split and run a model; the predicted time and memory, which can be compared with a recording."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from splitpipe.pipe import SplitPipe
from splitpipe.schedule.construct.library import variants
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw.measures import aligned, percent, size
from splitpipe.schedule.op import Schedule, counted
from splitpipe.schedule.recording import Recording
from splitpipe.schedule.timeline import Timeline, simulate

_FORM = 4  # The version of the JSON format, which readers check.


@dataclass(frozen=True)
class Pair:
    """A number that the plan predicted, and the recorded one."""

    predicted: float
    recorded: float

    @property
    def error(self) -> float:
        """The relative error of the prediction: (predicted - recorded) / recorded."""
        return self.predicted / self.recorded - 1 if self.recorded else 0.0


@dataclass(frozen=True)
class PlanComparison:
    """A plan's predictions and a recording. Times are in milliseconds, memory in bytes. ``print`` shows a table."""

    step: Pair  # From the step's start to the end of its last op.
    forward: tuple[Pair, ...]  # For each stage, of one microbatch.
    backward: tuple[Pair, ...]  # Likewise, B and W together, including recomputation.
    memory: tuple[Pair | None, ...]  # The most bytes on each device; None where they aren't counted.
    devices: tuple[str, ...]  # The devices' names.
    placement: tuple[int, ...]  # The device of each stage.

    def __str__(self) -> str:
        times = [("step ms", self.step)]
        for stage, device in enumerate(self.placement):
            where = f"stage {stage} on {self.devices[device]}"
            times += (f"{where}, F ms", self.forward[stage]), (f"{where}, B + W ms", self.backward[stage])
        rows = [["", "predicted", "recorded", "error"]]
        rows += [[what, f"{x.predicted:.3f}", f"{x.recorded:.3f}", f"{x.error:+.1%}"] for what, x in times]
        peaks = [(name, x) for name, x in zip(self.devices, self.memory) if x is not None]
        rows += [[f"memory of {name}", size(x.predicted), size(x.recorded), f"{x.error:+.1%}"] for name, x in peaks]
        return "\n".join(aligned(rows, "<>>>"))


@dataclass(frozen=True)
class RunnerUp:
    """Another way to run the model, with its predictions, and why it wasn't chosen."""

    way: str  # The schedule, microbatches, and what is checkpointed.
    balance: tuple[int, ...]
    step_time: float  # In milliseconds.
    peak_bytes: tuple[int, ...]  # For each device.
    why: str


@dataclass(frozen=True)
class Plan:
    """How to split and run a model on some devices: the result of ``splitpipe.plan``.

    Attributes:
        balance: the number of layers of each stage; for a module with cuts, the number of parts, each of which runs
            from one possible cut to the next.
        devices: one per row of the schedule, in order.
        placement: the device of each stage, as an index of ``devices``.
        chunks: the number of microbatches.
        checkpoint: which microbatches are checkpointed.
        schedule: the order of the ops on each device.
        way: the schedule's name and options, microbatches, and what is checkpointed.
        dropin: whether autograd runs backward after all forwards, because there was no ``loss_fn``.
        step_time: the predicted time of forward and backward of a batch, in milliseconds.
        costs: the predicted times of the stages, in milliseconds.
        peak_bytes: the predicted peak on each device: parameters, gradients, the optimizer's state and activations.
        memory: the bytes that each device has for the plan; infinite if unknown.
        layers: the names of the module's layers, or of the blocks at whose calls it may be cut, after one for what runs
            before them.
        runners_up: other ways to run it, with their predictions, and why they weren't chosen.
        cuts: the names of the blocks with whose calls stages 1, 2, ... start; None for an nn.Sequential.
        own_loss: whether a schedule runs backward from the module's own loss, the field ``loss`` of its output.
        loss_fn: the one given to ``splitpipe.plan``; None in a plan that was read from a file.
        compile: whether and how layers are compiled, as for ``SplitPipe``.

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
    cuts: tuple[str, ...] | None = None
    own_loss: bool = False
    loss_fn: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    compile: bool | Mapping[str, Any] = False

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.schedule.placement

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step, for drawing: each op with its times, in milliseconds."""
        return simulate(self.schedule, self.costs)

    @property
    def bubble(self) -> float:
        """The predicted fraction of the step in which a device is idle, on average."""
        return self.timeline.bubble

    def arguments(self, loss_fn: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Returns the arguments of ``SplitPipe`` except the module.

        Args:
            loss_fn: the loss function for the schedule. Default: the one given to ``splitpipe.plan``.

        Raises:
            TypeError: ``loss_fn`` can't be called.
            ValueError: the plan has a schedule but no ``loss_fn``, because it was read from a file.
        """
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is {loss_fn!r}: expected a function of output and target.")
        found = self._plain()
        if self.dropin:
            return found
        found["schedule"] = self.schedule.name if self._options() == {} else self.schedule
        loss_fn = self.loss_fn if loss_fn is None else loss_fn
        if loss_fn is None and not self.own_loss:
            raise ValueError(f"the plan, {self.way}, was read without loss_fn: expected arguments(loss_fn=criterion).")
        return found if loss_fn is None else {**found, "loss_fn": loss_fn}

    def apply(self, module: Any, loss_fn: Callable[..., Any] | None = None) -> SplitPipe:
        """Returns the module as a SplitPipe that follows the plan.

        Args:
            module: the module that was planned for.
            loss_fn: as for ``arguments``.

        Raises:
            TypeError: as for ``arguments`` and ``SplitPipe``.
            ValueError: as for ``arguments`` and ``SplitPipe``: the module has a different number of layers, or lacks
                blocks with these names.
        """
        return SplitPipe(module, **self.arguments(loss_fn))

    def compare(self, timeline: Recording) -> PlanComparison:
        """Compares the predictions with a recording, for the step and each stage.

        Args:
            timeline: training steps of ``plan.apply(module)``: ``with splitpipe.record(model) as timeline: ...``.

        Raises:
            TypeError: ``timeline`` isn't a Recording.
            ValueError: another schedule was recorded.
            RuntimeError: no step was recorded.
        """
        if not isinstance(timeline, Recording):
            raise TypeError(f"timeline is {timeline!r}: expected what `with splitpipe.record(model)` gives.")
        ran = timeline.schedule
        if ran.placement != self.placement or ran.microbatches != self.chunks:
            raise ValueError(
                f"found a recording of {counted(ran.microbatches, 'microbatch')} and stages on devices "
                f"{list(ran.placement)}: expected steps of plan.apply(module), with whole batches."
            )
        forward, backward = [
            tuple(map(Pair, _times(self.timeline, *each), _times(timeline, *each))) for each in ("F", ("B", "W", "BW"))
        ]
        peaks = zip(self.peak_bytes, timeline.memory)
        memory = tuple([None if most is None else Pair(peak, most) for peak, most in peaks])
        step = Pair(self.step_time, timeline.makespan)
        return PlanComparison(step, forward, backward, memory, timeline.devices, self.placement)

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes the plan, without ``loss_fn``, to the file ``path``, for ``from_json``.

        Raises:
            TypeError: ``path`` isn't a path.
            OSError: the file can't be written.
        """
        path = fspath(path)
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "loss_fn"}
        text = json.dumps({"splitpipe plan": _FORM, **own}, indent=1, default=asdict)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Plan:
        """Reads a plan that ``to_json`` wrote to the file ``path``.

        Raises:
            TypeError: ``path`` isn't a path.
            ValueError: the file doesn't contain a plan.
            OSError: the file can't be read.
        """
        path = fspath(path)
        try:
            text = json.loads(Path(path).read_text(encoding="utf-8"))
            if text.pop("splitpipe plan") != _FORM:
                raise ValueError("another version wrote it")
            schedule, costs = Schedule(**text.pop("schedule")), Costs(**text.pop("costs"))
            others = tuple(RunnerUp(**_with_tuples(other)) for other in text.pop("runners_up"))
            found = cls(schedule=schedule, costs=costs, runners_up=others, **_with_tuples(text))
            str(found)  # A field with a wrong type can't be printed.
            return found
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no plan ({error!r}): expected a file that Plan.to_json wrote.") from error

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes a zoomable page with the predicted step to the file ``path``. See ``Timeline.to_html``.

        Raises:
            TypeError: ``path`` isn't a path.
            OSError: the file can't be written.
        """
        self.timeline.to_html(path)

    def __str__(self) -> str:
        head = (f"{self.way} on {counted(len(self.devices), 'device')}: {self.step_time:.4g} ms per step predicted, "
                f"{percent(self.bubble)} of it bubble")
        times, start = self.costs.times(self.schedule), 0
        stages = [["stage", "device", "layers", "F ms", "B ms", "W ms"]]
        for stage, count in enumerate(self.balance):
            names = self.layers[start:start + count]
            start += count
            shown = names[0] if count == 1 else f"{names[0]} to {names[-1]}"
            each = [f"{times[kind][stage]:.3f}" for kind in ("F", "B", "W")]
            stages.append([str(stage), self.devices[self.placement[stage]], f"{shown} ({count})", *each])
        memory = [["device", "peak", "of"]] + [
            [name, size(peak), size(int(room)) if room < math.inf else "-"]
            for name, peak, room in zip(self.devices, self.peak_bytes, self.memory)
        ]
        others = [["not chosen", "ms", "peak", "why"]] + [
            [other.way, f"{other.step_time:.4g}", size(max(other.peak_bytes)), other.why] for other in self.runners_up
        ]
        tables = (stages, "><<>>>"), (memory, "<>>"), (others, "<>><")
        texts = ["\n".join(aligned(rows, sides)) for rows, sides in tables if len(rows) > 1]
        return "\n\n".join([f"{head}\n{self._code()}", *texts])

    def _plain(self) -> dict[str, Any]:
        where = {"balance": list(self.balance)} if self.cuts is None else {"cuts": list(self.cuts)}
        found = {**where, "devices": list(self.devices), "chunks": self.chunks, "checkpoint": self.checkpoint}
        return {**found, "compile": self.compile} if self.compile else found

    def _options(self) -> dict[str, Any] | None:
        """The options with which ``schedule.build`` makes the schedule from its name; None if no options do."""
        name, devices = self.schedule.name, len(self.devices)
        built = variants(name, devices, self.chunks, [self.schedule.stages // devices])
        options = min([options for options, schedule in built if schedule == self.schedule], key=len, default=None)
        # Without a loss_fn, "gpipe" alone would be drop-in.
        return {"split": False} if self.own_loss and name == "gpipe" and options == {} else options

    def _code(self) -> str:
        """The call that makes the model, to paste where ``module`` and ``loss_fn``, and maybe ``plan``, are known."""
        given = ", ".join(f"{name}={value!r}" for name, value in self._plain().items())
        if self.dropin:
            return f"model = splitpipe.SplitPipe(module, {given})"
        name, options = repr(self.schedule.name), self._options()
        if options is None:
            name = "plan.schedule"
        elif options:
            more = "".join(f", {option}={value!r}" for option, value in options.items())
            name = f"splitpipe.schedule.build({name}, {len(self.devices)}, {self.chunks}{more})"
        loss = "" if self.own_loss else ", loss_fn=loss_fn"
        return f"model = splitpipe.SplitPipe(module, {given}, schedule={name}{loss})"


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _times(timeline: Timeline, *kinds: str) -> list[float]:
    """The mean time of ops of some kinds in each stage, per microbatch."""
    found = [0.0] * timeline.schedule.stages
    for row in timeline.spans:
        for op, start, end in row:
            if op.kind in kinds:
                found[op.stage] += (end - start) / timeline.schedule.microbatches
    return found
