"""The measuring rig, of balance and planner: a copy of a module runs as a pipeline that is cut wherever it may be.

    unit 0 ─ cut ─> unit 1 ─ cut ─> unit 2 ...       each a stage, on one device; F, B and W apart

Units are the layers of an nn.Sequential, or what runs from one call of a repeated block to the next. One microbatch
runs through all of them, forward and backward, before the next one begins.
"""
from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from splitpipe.backward.graph_walk import unchanged
from splitpipe.balance.survey import START, Subject, copy_of, measuring
from splitpipe.compiled.layers import release
from splitpipe.core.note import add_note
from splitpipe.core.stream import Place
from splitpipe.core.tensors import map_tensors
from splitpipe.microbatch.division import chunk_rows, divide_target
from splitpipe.microbatch.tree import flatten
from splitpipe.partition.placement import move_stages
from splitpipe.piped import Arguments, complete, options_of, piped
from splitpipe.runtime.runtime import Runtime
from splitpipe.schedule.op import Op, Schedule, counted
from splitpipe.schedule.recording import Recording
from splitpipe.stage.segment import RunningStage

#: Addresses and bytes.
Storages = dict[tuple[torch.device, int], int]
#: The most microbatches of one run. As in training, the first one's W makes the gradient and the others add to it.
MICROBATCHES = 4
_FEWEST = 3  # Microbatches that count, unless there is only time for one.
_IDLE = 30  # Runs without anything to compute, to measure what a unit costs anyway.


@dataclass(frozen=True)
class Layer:
    """The costs of a layer, or of another unit, for one microbatch. Times are in milliseconds, memory in bytes."""

    forward: float
    backward_input: float
    backward_weight: float  # Computed separately by the split backward; 0 if B computes everything.
    saved: int = 0  # By F: all tensors that backward needs, including the layer's input.
    kept: int = 0  # Needed by W after B, and freed by it.
    input: int = 0  # The layer's input, which a cut before it copies.
    shared: int = 0  # Of ``saved``, what the layer before saves too; of the first layer, the model's input.
    repeated: int = 0  # Of ``saved``, what any layer before saves too, and the model's input.
    parameters: int = 0  # Its trained parameters, once for all; shared ones count for the first layer.
    state: int = 0  # Its other parameters, and buffers.

    @property
    def time(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def measure(
    subject: Subject, places: Sequence[Place], chunks: int = 1, seconds: float = 0.0,
    loss_fn: Callable[..., Any] | None = None, target: Any = None, compile: bool | Mapping[str, Any] = False,
) -> list[Layer]:
    """The costs of each unit on the first of some places, for one of ``chunks`` microbatches of the batch.

    If that place has too little memory, the units are spread over all places. Runs are repeated for some seconds, not
    counting the first. Without ``loss_fn``, the loss is the module's own, or costs nearly nothing.
    """
    rows = chunk_rows(subject.rows, chunks)[0]
    if loss_fn is not None:
        target = divide_target(target, None, [subject.rows]).some(rows)
    elif not subject.has_loss:
        loss_fn, target = _sum, 0
    release(subject.module)  # It is compiled again for these sizes, as it would be in training.
    given = rows, min(chunks, MICROBATCHES), seconds, loss_fn, target, compile
    try:
        try:
            return _measure(subject, places[:1], *given)
        except torch.OutOfMemoryError as error:
            if len({place.device for place in places}) == 1:
                raise
            traceback.clear_frames(error.__traceback__)  # They refer to the tensors that didn't fit.
        return _measure(subject, places, *given)
    except BaseException as error:
        what = f"{type(subject.module).__name__}, {counted(chunks, 'chunk')}, {places[0]}"
        add_note(error, f"Raised while profiling {what}, in a copy. The model is unchanged. Hooks don't run.")
        raise


def _measure(
    subject: Subject, places: Sequence[Place], rows: int, runs: int, seconds: float, loss_fn: Callable[..., Any] | None,
    target: Any, compile: bool | Mapping[str, Any],
) -> list[Layer]:
    with measuring(places[0].device):
        if isinstance(loss_fn, nn.Module):
            loss_fn = copy_of(loss_fn).to(places[-1].device)
        rig = Rig(subject, places, subject.arguments(rows, places[0].device), loss_fn, target, compile)
        rig.run()
        begun = perf_counter()
        recording, entered, saved, kept = rig.inspect()
        if perf_counter() - begun <= seconds / 2:
            end = begun + seconds
            recording = rig.record(lambda done: done < _FEWEST or perf_counter() < end, runs)
        state = rig.state()
        idle = times_of(record_idle(places[:1], subject.layered, len(state), runs))
    # Units in the middle are alike.
    bases = [*idle[:1], *idle[1:2] * (len(state) - len(idle)), *idle[1:]]
    found, before, seen = list[Layer](), entered[0].keys(), {*entered[0]}
    for j, (times, own) in enumerate(zip(times_of(recording), saved)):
        shared, repeated = (sum(own[key] for key in own.keys() & keys) for keys in (before, seen))
        forward, b, w = (max(0.0, one - base) for one, base in zip(times, bases[j]))
        sizes = sum(own.values()), kept[j], sum(entered[j].values()), shared, repeated
        found.append(Layer(forward, b, w, *sizes, *state[j]))
        before = own.keys()
        seen |= before
    return found


class Rig:
    """A module on some places with each unit as a stage, called with the arguments of a microbatch again and again."""

    def __init__(
        self, subject: Subject, places: Sequence[Place], given: tuple[tuple[Any, ...], dict[str, Any]],
        loss_fn: Callable[..., Any] | None, target: Any, compile: bool | Mapping[str, Any] = False,
    ) -> None:
        self._subject, self.call = subject, _Call(*given, target)
        count = len(subject.names)
        places, kind = places[:count], places[0].device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        options = complete("attach", Arguments(
            devices=[place.device for place in places], chunks=MICROBATCHES,
            schedule=_one_by_one([stage * len(places) // count for stage in range(count)]), loss_fn=loss_fn,
            grad_scaler=torch.amp.GradScaler(kind) if half else None, compile=compile, reduction="sum",
            split=self.call.split,
        ))
        module = subject.module.train()
        if subject.layered:
            resolved = options_of(options, [1] * count, batched=(None, None))
            move_stages([[layer] for layer in module._modules.values() if layer is not None], resolved.places)
            self._runtime = Runtime(resolved)
        else:
            self._runtime = piped(module, subject.names[1:], options).runtime

    def run(self, microbatches: int = 1) -> None:
        self.call.microbatches = microbatches
        given = self.call.args, self.call.kwargs, self.call.target
        self._runtime.run(self._runtime.batch(self._subject.module, *given))

    def record(self, go_on: Callable[[int], bool], microbatches: int = 1) -> Recording:
        """Records runs as long as ``go_on`` returns true for the number of microbatches."""
        done = 0
        with self._runtime.recordings.open() as recording:
            while go_on(done):
                self.run(microbatches)
                done += microbatches
        return recording

    def inspect(self) -> tuple[Recording, list[Storages], list[Storages], list[int]]:
        """Records a run of one microbatch; also, for each unit, what entered, what F saved, and the bytes W needed."""
        packed, kept = list[ref[Tensor]](), list[int]()
        entered, saved = list[Storages](), list[Storages]()

        def pack(x: Tensor) -> Tensor:
            y = x.detach()  # A node that kept its own output would be a cycle.
            packed.append(ref(y))
            return y

        def ended(stage: RunningStage, kind: str) -> None:
            if kind == "F":  # What is freed by now is of no use to backward.
                entered.append(memory_of(*[edge.ownership_token for edge in stage.fwd_cache[0].entries]))
                saved.append(memory_of(*[x for each in packed if (x := each()) is not None]))
                packed.clear()
            elif kind == "B":
                kept.insert(0, stage.store.size)

        with self._runtime.recordings.open(ended) as recording, saved_tensors_hooks(pack, unchanged):
            self.run()
        entered[0] = memory_of(*self.call.latest)  # All arguments; of the other units, only what has a graph.
        own = memory_of(*self._subject.module.parameters(), *self._subject.module.buffers())
        return recording, entered, [{key: each[key] for key in each.keys() - own.keys()} for each in saved], kept

    def state(self) -> list[list[int]]:
        """For each unit, the bytes of its trained parameters and of its other state; shared state counts once."""
        found, seen = [[0, 0] for _ in self._subject.names], set[int]()
        for part, j in sorted(self._runtime._stages_of(self._subject.module).items(), key=lambda item: item[1]):
            for x in (*part._parameters.values(), *part._buffers.values()):
                if x is not None and id(x) not in seen:
                    seen.add(id(x))
                    found[j][not x.requires_grad] += sum(memory_of(x).values())
        return found


@dataclass
class _Call:
    """A call that is made again and again; it doesn't refer to the module, which would then be part of a cycle."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    microbatches: int = 1
    latest: Sequence[Any] = ()  #: The leaves of the arguments of the latest run's first microbatch.

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> list[Any]:
        """The arguments of each microbatch: copies of those of the call."""
        copy = partial(map_tensors, lambda x: x.detach().clone().requires_grad_(x.requires_grad))
        found = [copy((args, kwargs)) for _ in range(self.microbatches)]
        self.latest, _ = flatten((found[0][0], [found[0][1][name] for name in self.kwargs]))
        return found


def _one_by_one(placement: Sequence[int]) -> Schedule:
    rows: list[list[Op]] = [[] for _ in {*placement}]
    stages = [*enumerate(placement)]
    for i in range(MICROBATCHES):
        for j, row in stages:
            rows[row].append(Op("F", j, i))
        for j, row in reversed(stages):
            rows[row] += Op("B", j, i), Op("W", j, i)
    return Schedule(rows, placement)


def _sum(output: Any, target: Any) -> Any:
    """The loss of a module without one: the sum of what requires grad."""
    leaves = flatten(output, fields=True)[0]
    return sum([x.real.sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad], torch.zeros(()))


def times_of(recording: Recording) -> list[tuple[float, ...]]:
    times = recording.costs().times(recording.schedule)
    return [*zip(times["F"], times["B"], times["W"])]


def record_idle(places: Sequence[Place], layered: bool, units: int, microbatches: int, size: int = 1) -> Recording:
    """Records up to five units that compute nothing, and pass each other ``size`` numbers."""
    names = tuple(map(str, range(min(units, 5))))
    module = (nn.Sequential if layered else Chain)(*(nn.Identity() for _ in names))
    subject = Subject(module, names if layered else (START, *names[1:]), None, 1, layered)  # type: ignore[arg-type]
    x = torch.zeros(1, size, device=places[0].device, requires_grad=True)
    rig = Rig(subject, places, ((x,), {}), lambda output, target: output.sum(), 0)
    rig.run()
    return rig.record(lambda done: done < _IDLE * microbatches, microbatches)


class Chain(nn.Sequential):
    """Layers in a row with a custom forward, so that they are cut by name like any module."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)  # type: ignore[no-untyped-call]


def memory_of(*values: Any) -> Storages:
    """The storages behind tensors: their addresses and bytes. Sparse tensors and a lazy layer's have none."""
    found: Storages = {}
    for x in values:
        if hasattr(x, "__tensor_flatten__"):
            found |= memory_of(*(getattr(x, name) for name in x.__tensor_flatten__()[0]))
        elif isinstance(x, Tensor) and x.layout is torch.strided and not is_lazy(x):
            storage = x.untyped_storage()
            found[x.device, storage.data_ptr()] = storage.nbytes()
    return found
