"""``Plan``: how to split and run a model, and the predicted time and memory."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from splitpipe.checks import UNCHECKPOINTED_TAIL, verify_module
from splitpipe.compiled.options import verify_compile
from splitpipe.pipe import SplitPipe
from splitpipe.planner import serialize
from splitpipe.planner.comparison import Comparison, compared
from splitpipe.schedule.construct.library import SCHEDULES, build, variants
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw.measures import aligned, percent, size
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.plurals import counted
from splitpipe.schedule.recording.recording import Recording
from splitpipe.schedule.timeline import Timeline, simulate

# Fields that JSON can represent as they are.
_PLAIN = (
    "balance", "devices", "chunks", "checkpoint", "way", "dropin", "step_time", "peak_bytes", "layers", "cuts",
    "own_loss", "compile",
)


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
        peak_bytes: the predicted peak on each device: parameters, gradients, the optimizer's state, activations, and
            the workspaces of matrix products.
        memory: the bytes that each device has for the plan; infinite if unknown.
        layers: the names of the module's layers, or of the blocks at whose calls it may be cut, after one for what runs
            before them.
        runners_up: other ways, and why they weren't chosen.
        cuts: the names of the blocks with whose calls stages 1, 2, ... start; None for an nn.Sequential.
        own_loss: whether a schedule runs backward from the module's own loss, the field ``loss`` of its output.
        loss_fn: the one given to ``splitpipe.plan``; None in a plan that was read from a file.
        note: a text to print with the plan.
        compile: whether and how layers are compiled, as for ``SplitPipe``.

    Raises:
        ValueError: a field doesn't match the schedule or the layers.

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
    note: str = field(default="", compare=False, repr=False)
    compile: bool | Mapping[str, Any] = False

    def __post_init__(self) -> None:
        each = len(self.devices), len(self.peak_bytes), len(self.memory)
        if len(self.balance) != self.schedule.stages or each != (self.schedule.devices,) * 3:
            raise ValueError(
                f"found {counted(len(self.balance), 'stage')} and names, peaks and memory of "
                f"{', '.join(map(str, each))} of the devices: expected the schedule's "
                f"{counted(self.schedule.stages, 'stage')}, and all of its {counted(self.schedule.devices, 'device')}."
            )
        if sum(self.balance) != len(self.layers) or 0 in self.balance:
            raise ValueError(
                f"balance {list(self.balance)} doesn't sum to {counted(len(self.layers), 'layer')}, or "
                "has a 0: expected the number of layers of each stage."
            )
        begin = [sum(self.balance[:stage]) for stage in range(1, len(self.balance))]
        if self.cuts is not None and self.cuts != tuple(self.layers[at] for at in begin):
            raise ValueError(
                f"cuts is {self.cuts!r}: expected the names of the layers with which stages start according to balance "
                f"{list(self.balance)}, or None."
            )
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks}: expected at least one microbatch.")
        for name in "dropin", "own_loss":
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected true or false.")
        if self.checkpoint not in UNCHECKPOINTED_TAIL:
            raise ValueError(f"checkpoint is {self.checkpoint!r}: expected one of {', '.join(UNCHECKPOINTED_TAIL)}.")
        verify_compile(self.compile)
        simulate(self.schedule, self.costs)

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
        return max(0.0, 1 - sum(self.timeline.work) / len(self.devices) / self.step_time) if self.step_time else 0.0

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
        found["schedule"] = self.schedule.name if self._named() else self.schedule
        loss_fn = self.loss_fn if loss_fn is None else loss_fn
        if loss_fn is None and self.own_loss:
            return found
        if loss_fn is None:
            raise ValueError(
                f"the plan is {self.way}, which runs backward itself, and a plan that was read from a file has no "
                "loss_fn: expected plan.arguments(loss_fn=criterion)."
            )
        return {**found, "loss_fn": loss_fn}

    def _named(self) -> bool:
        """True if the schedule's name is enough to build it. Without a loss_fn, "gpipe" is drop-in."""
        return self._options() == {} and not (self.own_loss and self.schedule.name == "gpipe")

    def _options(self) -> dict[str, Any] | None:
        """The options with which ``schedule.build`` makes the schedule from its name; None if no options do."""
        name, devices = self.schedule.name, len(self.devices)
        tried: list[dict[str, Any]] = [{}]
        if name in SCHEDULES:
            tried += variants(name, devices, [self.schedule.stages // devices])
        for options in tried:
            with suppress(ValueError):
                if build(name, devices, self.chunks, **options) == self.schedule:
                    return options
        return None

    def apply(self, module: Any, loss_fn: Callable[..., Any] | None = None) -> SplitPipe:
        """Returns the module as a SplitPipe that follows the plan.

        Args:
            module: the module that was planned for.
            loss_fn: as for ``arguments``.

        Raises:
            TypeError: as for ``arguments`` and ``SplitPipe``.
            ValueError: as for ``arguments``; or the module has a different number of layers, or lacks blocks with these
                names.
        """
        if self.cuts is not None:
            return SplitPipe(module, **self.arguments(loss_fn))
        verify_module(module)
        if len(module) != len(self.layers):
            raise ValueError(
                f"the module has {counted(len(module), 'layer')}, and the plan was made for {len(self.layers)}: "
                "expected the same number."
            )
        return SplitPipe(module, **self.arguments(loss_fn))

    def compare(self, timeline: Recording) -> Comparison:
        """Compares the predictions with a recording, for the step and each stage.

        Args:
            timeline: training steps of ``plan.apply(module)``: ``with model.record() as timeline: ...``.

        Raises:
            TypeError: ``timeline`` isn't a Recording.
            ValueError: another schedule was recorded.
            RuntimeError: no step was recorded.
        """
        if not isinstance(timeline, Recording):
            raise TypeError(f"timeline is {timeline!r}: expected the recording of `with model.record() as timeline:`.")
        return compared(self.timeline, self.step_time, self.peak_bytes, timeline)

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes the plan, without ``loss_fn``, to the file ``path``, for ``from_json``.

        Raises:
            TypeError: ``path`` isn't a path.
            OSError: the file can't be written.
        """
        path = fspath(path)
        own = {name: getattr(self, name) for name in _PLAIN}
        more = {
            "schedule": serialize.of_schedule(self.schedule),
            "costs": asdict(self.costs),
            "memory": [int(size) if size < math.inf else None for size in self.memory],
            "runners_up": [asdict(other) for other in self.runners_up],
        }
        text = json.dumps({"splitpipe plan": serialize.FORM, **own, **more}, indent=1)
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
            if text["splitpipe plan"] != serialize.FORM:
                raise ValueError(f"its format is {text['splitpipe plan']}, but this version reads {serialize.FORM}")
            own = {name: _tuple(text[name]) for name in _PLAIN if name != "compile" or name in text}
            others = [{name: _tuple(value) for name, value in other.items()} for other in text["runners_up"]]
            found = cls(
                **own,
                schedule=serialize.schedule_of(text["schedule"]),
                costs=Costs(**{field.name: text["costs"][field.name] for field in fields(Costs)}),
                memory=tuple(math.inf if size is None else size for size in text["memory"]),
                runners_up=tuple(RunnerUp(**other) for other in others),
            )
            str(found)  # A field with a wrong type can't be printed.
            return found
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
            raise ValueError(
                f"{path} doesn't contain a plan: {what}. Expected a file that Plan.to_json wrote."
            ) from error

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
        tables = self._stages(), self._memory(), self._others()
        texts = [f"{head}\n{self._code()}", *("\n".join(lines) for lines in tables if lines), self.note]
        return "\n\n".join(filter(None, texts))

    def _plain(self) -> dict[str, Any]:
        """The arguments of SplitPipe, except for those of the schedule."""
        where = {"balance": list(self.balance)} if self.cuts is None else {"cuts": list(self.cuts)}
        found = {**where, "devices": list(self.devices), "chunks": self.chunks, "checkpoint": self.checkpoint}
        return {**found, "compile": self.compile} if self.compile else found

    def _code(self) -> str:
        """The call that makes the model, to paste where ``module`` and ``loss_fn`` are those that were planned for.

        If no name builds the schedule, the call uses ``plan`` too.
        """
        given = ", ".join(f"{name}={value!r}" for name, value in self._plain().items())
        if self.dropin:
            return f"model = splitpipe.SplitPipe(module, {given})"
        loss = "" if self.own_loss else ", loss_fn=loss_fn"
        name, options = repr(self.schedule.name), self._options()
        if options is None:
            name = "plan.schedule"
        elif not self._named():
            more = "".join(f", {option}={value!r}" for option, value in options.items())
            name = f"splitpipe.schedule.build({name}, {len(self.devices)}, {self.chunks}{more})"
        return f"model = splitpipe.SplitPipe(module, {given}, schedule={name}{loss})"

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
            rows.append([name, size(peak), size(int(room)) if room < math.inf else "-"])
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
