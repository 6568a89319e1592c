"""Measures what a plan is chosen by: the layers on each kind of device, the devices, and the links between them.

    for each kind of device, for each number of chunks:
        a copy of each layer, as a stage of its own ─> times of F, B and W, and what memory they take
        copies of some layers in a row, the same    ─> what they take in company

The model, its gradients and buffers, the sample, the random state and the numbers of threads are only read.
"""
from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.balance.layers import Flow, arrives, copy_of, follows, memory_of, repeated, sandbox, state_of, walk
from splitpipe.core.microbatch import batch_size, cuts, flatten, unflatten
from splitpipe.core.stream import Place
from splitpipe.planner.company import ROUNDS, divided, length
from splitpipe.planner.devices import USABLE, capacity, kinds_of, room, workspace
from splitpipe.planner.load import Load
from splitpipe.planner.probe import ROWS, Loss, Named, Probe, Times, sized, times_of
from splitpipe.planner.profile import Device, Kind, Layer, Link, Profile
from splitpipe.planner.progress import Progress
from splitpipe.planner.transfers import entry, gap, link

#: Microbatches that count, at least, of a layer that is run more than once.
_RUNS = 3
#: Milliseconds of a run to which it adds nothing that a probe costs besides its layer.
_LONG = 50.0


@dataclass(frozen=True)
class _Measured:
    layer: Layer
    trains: bool
    parameters: int
    state: int


def profile(
    module: nn.Sequential,
    sample: Any,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    places: Sequence[Place],
    chunks: Sequence[int],
    *,
    memory: float | Sequence[float] | None,
    optimizer_state: float,
    seconds: float,
    progress: Progress,
) -> Profile:
    """What the layers of a module take.

    Args:
        module: the model.
        sample: a whole batch.
        target: for ``loss_fn``; None: its time does not count.
        loss_fn: of the last layer's output and the target; None: the model is run without.
        places: the devices, one a row.
        chunks: numbers of microbatches. One whose microbatches a layer refuses is left out, if it takes others.
        memory: bytes of each device, one number for each or for all; None: what is free there.
        optimizer_state: bytes that the optimizer keeps for a byte of parameters.
        seconds: about how long to measure. A layer that takes longer than its part is run once.
        progress: called before each layer is measured.

    Raises:
        BaseException: what a layer raises, with a note that says which, for how many chunks, and where.
    """
    groups = kinds_of(places)
    leaves, _ = flatten(sample, "the sample", batch=True)
    rows = batch_size(leaves)
    numbers = sorted(set(chunks))
    work = _Work(module, sample, target, loss_fn, rows, seconds, len(groups) * len(numbers), progress)
    kinds, found = [], None
    for name, members in groups.items():
        load = Load(len(members) if places[members[0]].device.type == "cpu" else 1)
        place = places[members[0]]
        measured = work.kind(name, place, load, numbers)
        found = next(iter(measured.values()))
        layers = {count: tuple(each.layer for each in row) for count, row in measured.items()}
        with sandbox(place.device):
            kinds.append(Kind(name, layers, gap(place), workspace(place.device)))
    if found is None or not set.intersection(*(set(kind.layers) for kind in kinds)):
        each = "; ".join(f"{kind.name}: {sorted(kind.layers)}" for kind in kinds)
        raise ValueError(f"no number of chunks can be run everywhere ({each}): expected one. Give more to choose from.")
    largest = max(layer.input for kind in kinds for row in kind.layers.values() for layer in row)
    home = {place: kind for kind, members in enumerate(groups.values()) for place in members}
    free = room(module, places, memory)
    with sandbox(places[0].device):
        slowest = link(places, largest) if len(places) > 1 else Link()
    return Profile(
        names=tuple(module._modules),
        parameters=tuple(each.parameters for each in found),
        state=tuple(each.state for each in found),
        kinds=tuple(kinds),
        devices=tuple(Device(str(place), home[row], free[row]) for row, place in enumerate(places)),
        link=slowest,
        batch=rows,
        optimizer_state=optimizer_state,
        tied=tuple(_tied(module)),
        apart=sum(place.device.type == "cpu" for place in places) < 2,
    )


class _Work:
    """Measurements that share a time."""

    def __init__(
        self, module: nn.Sequential, sample: Any, target: Any, loss_fn: Callable[..., Any] | None, rows: int,
        seconds: float, walks: int, progress: Progress,
    ) -> None:
        self._module, self._sample, self._target, self._loss_fn = module, sample, target, loss_fn
        self._rows = rows
        self._end = perf_counter() + seconds
        # A layer that takes longer is run once: all layers a second time would take half of the time.
        self._most = seconds / 2 / len(module)
        self._run = length(len(module))
        self._steps = len(module) * (1 + ROUNDS)  # Of a walk.
        self._total, self._done = walks * self._steps, 0
        self._progress = progress
        self._repeated = repeated(module)

    def kind(self, name: str, place: Place, load: Load, chunks: Sequence[int]) -> dict[int, list[_Measured]]:
        """What the layers take on a kind of device, for each number of chunks that they can be run with."""
        found: dict[int, list[_Measured]] = {}
        refused: Exception | None = None
        for number, count in enumerate(chunks):
            before = self._done
            try:
                found[count] = self._walk(place, load, count)
            except Exception as error:
                # Fewer rows than a layer takes, or more than the device has memory for.
                if not found and not (isinstance(error, torch.OutOfMemoryError) and number + 1 < len(chunks)):
                    raise
                traceback.clear_frames(error.__traceback__)  # They hold what did not fit.
                refused = error
                self._done = before + self._steps
        if not found and refused is not None:
            raise refused
        return found

    def _walk(self, place: Place, load: Load, chunks: int) -> list[_Measured]:
        loss = self._loss(place, chunks)
        flows: dict[int, Flow] = {}  # Into the first layer of each run.
        once: set[int] = set()  # Layers that are too large to be run again.

        def measure(done: list[_Measured], copied: nn.Module, flow: Flow) -> tuple[_Measured, Flow]:
            at = len(done)
            name, layer = list(self._module._modules.items())[at]
            self._progress(self._done, self._total, f"layer {name} ({type(layer).__name__}), {chunks} chunks, {place}")
            if at % self._run == 0:
                flows[at] = flow
            probes = self._probes([(name, copied)], flow, place, load, chunks, loss)

            def part(ended: threading.Event) -> Layer:
                took, recording = probes[0].first()
                if took > self._most * 1e3:
                    once.add(at)
                saving = None if at in once else probes[0].saving()
                return sized(probes[0], recording, saving, *times_of(recording))

            found = load.run(part, [probe.burden for probe in probes[1:]])
            self._done += 1
            sizes = [0, 0]
            for own, tensor in state_of(copied):
                if own not in self._repeated[at]:
                    sizes[not tensor.requires_grad] += sum(memory_of(tensor).values())
            trains = any(x.requires_grad for x in probes[0].after.tensors())
            return _Measured(found, trains, *sizes), follows(flow, probes[0].flow, probes[0].after)

        found = walk(self._module, self._part(self._sample, chunks), place.device, measure, f", with {chunks} chunks")
        runs = {start: range(start, min(start + self._run, len(found))) for start in flows}
        rounds: dict[int, list[list[Times]]] = {start: [] for start in runs}
        for number in range(ROUNDS):  # Each of all runs: a machine's pace changes.
            for start, run in runs.items():
                if not once.intersection(run) and (number == 0 or perf_counter() < self._end):
                    alone = found[start : run.stop]
                    rounds[start] += self._in_company(alone, start, flows[start], place, load, chunks, loss)
                self._done += len(run)
        for start, run in runs.items():
            for at, each in zip(run, zip(*rounds[start])):
                middle = Times(*map(median, zip(*each)))
                if not found[at].trains:  # Nothing goes backward here.
                    middle = Times(middle.forward, 0.0, 0.0)
                found[at] = replace(found[at], layer=replace(found[at].layer, **middle._asdict()))
        return found

    def _in_company(
        self, alone: Sequence[_Measured], start: int, flow: Flow, place: Place, load: Load, chunks: int,
        loss: Loss | None,
    ) -> list[list[Times]]:
        """What each layer of a run takes in company; nothing, if there is no room for it."""
        layers = list(self._module._modules.items())[start : start + len(alone)]
        rows = min(chunks, ROWS)
        needs = sum(2 * each.parameters + each.state + rows * each.layer.saved for each in alone)
        if place.device.type != "cpu" and needs > USABLE * capacity(place.device)[0]:
            return []
        what = f"layers {layers[0][0]} to {layers[-1][0]}"
        self._progress(self._done, self._total, f"{what}, {chunks} chunks, {place}")
        with sandbox(place.device):
            try:
                copied = [(name, copy_of(layer).to(place.device).train()) for name, layer in layers]
                probes = self._probes(copied, flow, place, load, chunks, loss)

                def part(ended: threading.Event) -> list[Times]:
                    whole, apart = probes[0], probes[0].apart()
                    half = 2 if len(alone) > 1 else 1
                    took = whole.warm()
                    # Of what takes long this is nothing.
                    base = entry(whole.flow, place, chunks) if took < _LONG * len(alone) else Times(0.0, 0.0, 0.0)
                    (together,) = self._times(whole, ended, self._share(len(alone) / half), base)
                    if len(alone) == 1:
                        return [together]
                    return divided(self._times(apart, ended, self._share(len(alone) / half), base), together)

                return [load.run(part, [probe.burden for probe in probes[1:]])]
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # They hold what did not fit.
                return []

    def _probes(
        self, layers: Sequence[Named], flow: Flow, place: Place, load: Load, chunks: int, loss: Loss | None
    ) -> list[Probe]:
        """A probe for each row that computes at once; the first has the layers, and the loss behind the last one."""
        last = layers[-1][0] == list(self._module._modules)[-1]
        one = len(layers) == 1
        return [
            Probe(
                layers if row == 0 else [(name, copy_of(layer)) for name, layer in layers],
                arrives(layers[0][1] if one else nn.ModuleList(layer for _, layer in layers), flow), place, chunks,
                loss if row == 0 and last else None,
            )
            for row in range(load.rows if chunks > 1 else 1)  # One microbatch is nowhere at once.
        ]

    def _share(self, steps: float) -> float:
        """Until when to measure what comes next, which counts for so many steps."""
        now = perf_counter()
        return now + steps * max(0.0, self._end - now) / (self._total - self._done)

    def _times(self, probe: Probe, ended: threading.Event, end: float, base: Times) -> list[Times]:
        """What each stage of a probe takes, without what a stage of no layers does."""
        found = probe.times(lambda done: not ended.is_set() and (done < _RUNS or perf_counter() < end))
        return [Times(*(max(0.0, time - own) for time, own in zip(each, base))) for each in found]

    def _loss(self, place: Place, chunks: int) -> Loss | None:
        if self._loss_fn is None or self._target is None:
            return None
        loss_fn: Any = self._loss_fn
        with sandbox(place.device):  # What is copied in inference mode can't be saved for backward.
            if isinstance(loss_fn, nn.Module):
                loss_fn = copy_of(loss_fn).to(place.device)
            target = Flow(self._part(self._target, chunks), {}).map(lambda x: x.detach().to(place.device, copy=True))
        return loss_fn, target.value

    def _part(self, value: Any, chunks: int) -> Any:
        """The first microbatch."""
        leaves, spec = flatten(value, "the sample", batch=True)
        count = cuts(self._rows, chunks)[0][1]
        return unflatten([leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves], spec)


def _tied(module: nn.Sequential) -> Iterator[tuple[int, int]]:
    """Pairs of layers that share a parameter or buffer."""
    held = [{id(tensor) for _, tensor in state_of(layer)} for layer in module]
    return (pair for pair in combinations(range(len(held)), 2) if held[pair[0]] & held[pair[1]])
