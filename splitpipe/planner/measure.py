"""Makes the measurements for a plan: the layers on each kind of device, the devices, and the links between them.

    for each kind of device, for each number of chunks:
        a copy of each layer, alone, as a stage of its own ─> times of F, B and W, and the bytes that they hold

The model, its gradients and buffers, the sample, the random state and the numbers of threads are only read.
"""
from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from splitpipe.balance import layers
from splitpipe.balance.layers import Flow
from splitpipe.core.microbatch import batch_size, cuts, flatten, unflatten
from splitpipe.core.stream import Place
from splitpipe.planner.machine import gap, kinds_of, link, shared_threads, usable_bytes, workspace
from splitpipe.planner.probe import ROWS, Loss, Probe, Times, times_of
from splitpipe.planner.profile import Device, Kind, Layer, Link, Profile
from splitpipe.schedule.plurals import counted

# Called with the number of layers done, the number of all, and the name of the next.
Progress = Callable[[int, int, str], None]
# Microbatches that count, at least, of a layer that is run more than once.
_RUNS = 3
# Milliseconds of a run to which the ends of a probe add nothing that counts.
_LONG = 50.0
# Columns of the progress bar.
_WIDTH = 12


class _Measured(NamedTuple):
    layer: Layer
    parameters: int  # Bytes.
    state: int


def profile(
    module: nn.Sequential,
    sample: Any,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    places: Sequence[Place],
    chunks: Sequence[int],
    *,
    memory: Sequence[float] | None,
    optimizer_state: float,
    seconds: float,
    progress: Progress,
) -> Profile:
    """The costs of a module's layers on some devices, for each number of chunks that layers and memory allow."""
    groups = kinds_of(places)
    leaves, _ = flatten(sample, "the sample", batch=True)
    rows = batch_size(leaves)
    work = _Work(
        module=module,
        sample=sample,
        target=target,
        loss_fn=loss_fn,
        rows=rows,
        seconds=seconds,
        walks=len(groups) * len(chunks),
        progress=progress,
    )
    kinds = []
    found: list[_Measured] = []
    for name, members in groups.items():
        place = places[members[0]]
        with shared_threads(len(members) if place.device.type == "cpu" else 1):
            measured = work.kind(place, chunks)
            with layers.measuring(place.device):
                between = gap(place)
        found = next(iter(measured.values()))
        costs = {count: tuple(each.layer for each in row) for count, row in measured.items()}
        kinds.append(Kind(name, costs, between, workspace(place.device)))
    if not set.intersection(*(set(kind.layers) for kind in kinds)):
        each = "; ".join(f"{kind.name}: {sorted(kind.layers)}" for kind in kinds)
        raise ValueError(f"no number of chunks can be run everywhere ({each}): expected one. Give more to choose from.")
    largest = max(layer.input for kind in kinds for row in kind.layers.values() for layer in row)
    home = {place: kind for kind, members in enumerate(groups.values()) for place in members}
    free = usable_bytes(module, places, memory)
    with layers.measuring(places[0].device):
        slowest = link(places, largest) if len(places) > 1 else Link()
    return Profile(
        names=tuple(module._modules),
        parameters=tuple(each.parameters for each in found),
        state=tuple(each.state for each in found),
        kinds=tuple(kinds),
        devices=tuple(Device(str(place), home[row], free[row]) for row, place in enumerate(places)),
        link=slowest,
        optimizer_state=optimizer_state,
        tied=tuple(_tied(module)),
        own_compute=sum(place.device.type == "cpu" for place in places) < 2,
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
        self._total, self._done = walks * len(module), 0
        self._progress = progress
        self._repeated = layers.repeated_state(module)

    def kind(self, place: Place, chunks: Sequence[int]) -> dict[int, list[_Measured]]:
        """The costs of the layers on a kind of device, for each number of chunks that they can be run with."""
        found: dict[int, list[_Measured]] = {}
        for number, count in enumerate(chunks):
            before = self._done
            try:
                found[count] = self._walk(place, count)
            except Exception as error:
                # Fewer rows than a layer takes, or more than the device has memory for.
                if not found and not (isinstance(error, torch.OutOfMemoryError) and number + 1 < len(chunks)):
                    raise
                traceback.clear_frames(error.__traceback__)  # They have the tensors that did not fit.
                self._done = before + len(self._module)
        return found

    def _walk(self, place: Place, chunks: int) -> list[_Measured]:
        loss = self._loss(place, chunks)
        names = list(self._module._modules)
        base = self._ends(place, chunks)

        def measure(done: list[_Measured], copied: nn.Module, flow: Flow) -> tuple[_Measured, Flow]:
            at = len(done)
            self._progress(
                self._done, self._total,
                f"layer {names[at]} ({type(copied).__name__}), {counted(chunks, 'chunk')}, {place}",
            )
            arriving = layers.input_flow(copied, flow)
            probe = Probe(names[at], copied, arriving, place, chunks, loss=loss if at + 1 == len(names) else None)
            layer = self._layer(probe, base)
            self._done += 1
            sizes = [0, 0]
            for own, tensor in layers.state_of(copied):
                if own not in self._repeated[at]:
                    sizes[not tensor.requires_grad] += sum(layers.memory_of(tensor).values())
            return _Measured(layer, *sizes), layers.output_flow(flow, arriving, probe.after)

        sample = self._part(self._sample, chunks)
        return layers.measure_layers(self._module, sample, place.device, measure, f", with {counted(chunks, 'chunk')}")

    def _layer(self, probe: Probe, base: Times) -> Layer:
        took, recording = probe.first()
        if took > self._most * 1e3:
            times, ends = times_of(recording), None
        else:
            ends = probe.saved_ends()
            now = perf_counter()
            end = now + max(0.0, self._end - now) / (self._total - self._done)
            times = probe.times(lambda done: done < _RUNS or perf_counter() < end)
        if took < _LONG:
            times = Times(*(max(0.0, time - own) for time, own in zip(times, base)))
        if not any(x.requires_grad for x in probe.after.tensors()):
            times = Times(times.forward, 0.0, 0.0)  # Nothing goes backward here.
        return replace(probe.sizes(recording, ends), **times._asdict())

    def _ends(self, place: Place, chunks: int) -> Times:
        """The times of a probe's ops without a layer."""
        with layers.measuring(place.device):
            flow = Flow(torch.zeros(1, device=place.device, requires_grad=True), {})
            probe = Probe("(none)", nn.Identity(), flow, place, chunks)
            probe.first()
            return probe.times(lambda done: done < 6 * ROWS)

    def _loss(self, place: Place, chunks: int) -> Loss | None:
        loss_fn: Any = self._loss_fn
        if loss_fn is None:
            return None
        with layers.measuring(place.device):  # A copy made in inference mode can't be saved for backward.
            if isinstance(loss_fn, nn.Module):
                loss_fn = layers.copy_of(loss_fn).to(place.device)
            target = Flow(self._part(self._target, chunks), {}).map(lambda x: x.detach().to(place.device, copy=True))
        return loss_fn, target.value

    def _part(self, value: Any, chunks: int) -> Any:
        """The first microbatch."""
        leaves, spec = flatten(value, "the sample", batch=True)
        count = cuts(self._rows, chunks)[0][1]
        return unflatten([leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves], spec)


def _tied(module: nn.Sequential) -> Iterator[tuple[int, int]]:
    """Pairs of layers that share a parameter or buffer."""
    own = [{id(tensor) for _, tensor in layers.state_of(layer)} for layer in module]
    return (pair for pair in combinations(range(len(own)), 2) if own[pair[0]] & own[pair[1]])


@contextmanager
def bar(shown: bool | None = None, file: TextIO | None = None) -> Iterator[Progress]:
    """A progress bar: one line on standard error, if that is a terminal; gone when the block ends."""
    out = sys.stderr if file is None else file
    if out is None or not (out.isatty() if shown is None else shown):  # None if it was closed from the start.
        yield lambda done, total, what: None
        return
    longest = 0

    def show(done: int, total: int, what: str) -> None:
        nonlocal longest
        full = _WIDTH * done // total if total else _WIDTH
        line = f"profiling [{'#' * full}{'-' * (_WIDTH - full)}] {done}/{total} {what}"
        longest = max(longest, len(line))
        out.write("\r" + line.ljust(longest))
        out.flush()

    try:
        yield show
    finally:
        if longest:
            out.write("\r" + " " * longest + "\r")
            out.flush()
