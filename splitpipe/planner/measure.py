"""Measures what a plan is chosen by: the layers on each kind of device, the devices, and the links between them.

    for each kind of device, for each number of chunks, for each layer:
        a copy of the layer, as a stage of its own ─> times of F, B and W, and what memory they take

The model, its gradients and buffers, the sample, the random state and the numbers of threads are only read.
"""
from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.balance.profile import Flow, arrives, copy_of, follows, memory_of, repeated, sandbox, state_of, walk
from splitpipe.microbatch import batch_size, cuts, flatten, unflatten
from splitpipe.partition import Place
from splitpipe.planner.links import entry, gap, link
from splitpipe.planner.load import Load
from splitpipe.planner.probe import Loss, Probe, Times, sized, times_of
from splitpipe.planner.profile import Device, Kind, Layer, Link, Profile
from splitpipe.planner.progress import Progress

#: Of an accelerator's free memory: the rest is for workspaces, and for what fragmentation loses.
_USABLE = 0.9
#: Microbatches that count, at least, of a layer that is run more than once.
_RUNS = 3
#: Milliseconds of a run to which it adds nothing that a probe costs besides its layer.
_LONG = 50.0


@dataclass(frozen=True)
class _Measured:
    layer: Layer
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
    groups = _kinds(places)
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
            kinds.append(Kind(name, layers, gap(place)))
    if found is None or not set.intersection(*(set(kind.layers) for kind in kinds)):
        each = "; ".join(f"{kind.name}: {sorted(kind.layers)}" for kind in kinds)
        raise ValueError(f"no number of chunks can be run everywhere ({each}): expected one. Give more to choose from.")
    largest = max(layer.input for kind in kinds for row in kind.layers.values() for layer in row)
    home = {place: kind for kind, members in enumerate(groups.values()) for place in members}
    free = _memory(module, places, memory)
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
        self._total, self._done = walks * len(module), 0
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
                self._done = before + len(self._module)
        if not found and refused is not None:
            raise refused
        return found

    def _walk(self, place: Place, load: Load, chunks: int) -> list[_Measured]:
        loss = self._loss(place, chunks)

        def measure(done: list[_Measured], copied: nn.Module, flow: Flow) -> tuple[_Measured, Flow]:
            at = len(done)
            name, layer = list(self._module._modules.items())[at]
            self._progress(self._done, self._total, f"layer {name} ({type(layer).__name__}), {chunks} chunks, {place}")
            arriving = arrives(copied, flow)
            probes = [
                Probe(
                    copied if row == 0 else copy_of(copied), name, arriving, place, chunks,
                    loss if row == 0 and at == len(self._module) - 1 else None,
                )
                for row in range(load.rows if chunks > 1 else 1)  # One microbatch is nowhere at once.
            ]

            def part(ended: threading.Event) -> Layer:
                return self._measured(probes[0], ended, lambda: entry(arriving, name, place, chunks))

            found = load.run(part, [probe.burden for probe in probes[1:]])
            self._done += 1
            sizes = [0, 0]
            for own, tensor in state_of(copied):
                if own not in self._repeated[at]:
                    sizes[not tensor.requires_grad] += sum(memory_of(tensor).values())
            return _Measured(found, *sizes), follows(flow, arriving, probes[0].after)

        return walk(self._module, self._part(self._sample, chunks), place.device, measure, f", with {chunks} chunks")

    def _measured(self, probe: Probe, ended: threading.Event, entry: Callable[[], Times]) -> Layer:
        begun = perf_counter()
        share = max(0.0, self._end - begun) / (self._total - self._done)
        took, recording = probe.first()
        if took > share * 1e3:
            return sized(probe, recording, None, times_of(recording))
        saving = probe.saving()
        times = probe.times(lambda done: not ended.is_set() and (done < _RUNS or perf_counter() - begun < share))
        # Of what takes long this is nothing.
        base = entry() if took < _LONG else Times(0.0, 0.0, 0.0)
        return sized(probe, recording, saving, Times(*(max(0.0, all_ - own) for all_, own in zip(times, base))))

    def _loss(self, place: Place, chunks: int) -> Loss | None:
        if self._loss_fn is None or self._target is None:
            return None
        loss_fn: Any = self._loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn = copy_of(loss_fn).to(place.device)
        target = Flow(self._part(self._target, chunks), {}).map(lambda x: x.detach().to(place.device, copy=True))
        return loss_fn, target.value

    def _part(self, value: Any, chunks: int) -> Any:
        """The first microbatch."""
        leaves, spec = flatten(value, "the sample", batch=True)
        count = cuts(self._rows, chunks)[0][1]
        return unflatten([leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves], spec)


def _kinds(places: Sequence[Place]) -> dict[str, list[int]]:
    """The rows of each kind of device."""
    found: dict[tuple[object, ...], list[int]] = {}
    names: dict[tuple[object, ...], str] = {}
    for row, place in enumerate(places):
        key: tuple[object, ...] = ("cpu",)
        name = "cpu"
        if place.device.type != "cpu":
            # Some kinds of accelerators have no names.
            ask: Any = getattr(torch.get_device_module(place.device), "get_device_name", None)
            name = place.device.type if ask is None else ask(place.device)
            key = (name, _capacity(place.device)[1])
            if place.stream is not None:  # It may be a part of a device.
                name, key = f"{name}, stream of {place} (row {row})", (place.device, place.stream.stream_id)
        found.setdefault(key, []).append(row)
        names[key] = name if name not in names.values() else names.get(key, f"{name} ({len(names)})")
    return {names[key]: rows for key, rows in found.items()}


def _capacity(device: torch.device) -> tuple[float, float]:
    """Bytes that are free on an accelerator, and all that it has; infinite if it does not tell."""
    modules: list[tuple[Any, str]] = [
        (torch.accelerator, "get_memory_info"), (torch.get_device_module(device), "mem_get_info")
    ]
    for module, name in modules:
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            free, total = getattr(module, name)(device)
            return int(free), int(total)
    return math.inf, math.inf


def _memory(module: nn.Sequential, places: Sequence[Place], memory: float | Sequence[float] | None) -> list[float]:
    """Bytes that each row may use."""
    if isinstance(memory, (int, float)):
        return [memory] * len(places)
    if memory is not None:
        return list(memory)
    devices = [place.device for place in places]
    own: dict[torch.device, dict[Any, int]] = {}
    for _, tensor in state_of(module):
        own.setdefault(tensor.device, {}).update(memory_of(tensor))
    free = {
        device: math.inf if device.type == "cpu"
        else (_capacity(device)[0] + sum(own.get(device, {}).values())) * _USABLE / devices.count(device)
        for device in set(devices)
    }
    return [free[device] for device in devices]


def _tied(module: nn.Sequential) -> Iterator[tuple[int, int]]:
    """Pairs of layers that share a parameter or buffer."""
    held = [{id(tensor) for _, tensor in state_of(layer)} for layer in module]
    return (pair for pair in combinations(range(len(held)), 2) if held[pair[0]] & held[pair[1]])
