"""Takes the measurements for a plan: of the layers on each kind of device, the devices, and the links between them.

    for each kind of device, for each number of chunks:
        a copy of each layer, alone, as a separate stage ─> times of F, B and W, and the bytes that they hold

The model, its gradients and buffers, the sample, the random state and the numbers of threads are only read.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from splitpipe.balance import layers
from splitpipe.balance.layers import Flow
from splitpipe.balance.units import Times, times_of
from splitpipe.compiled.layers import Compiler
from splitpipe.compiled.options import verify_compile
from splitpipe.core.microbatch import batch_size, cuts, flatten, unflatten
from splitpipe.core.stream import Place
from splitpipe.core.tensors import memory_of
from splitpipe.planner.machine import gap, kinds_of, link, shared_threads, usable_bytes, workspace
from splitpipe.planner.probe import Loss, Probe
from splitpipe.planner.profile import Device, Kind, Layer, Link, Profile
from splitpipe.planner.work import ROWS, RUNS, Cuttable, Measured, ModuleWork, Progress, Work
from splitpipe.schedule.plurals import counted

# A run of this many milliseconds is long compared with the ends of a probe.
_LONG = 50.0
# Columns of the progress bar.
_WIDTH = 12


def profile(
    module: nn.Module,
    sample: Any,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    places: Sequence[Place],
    chunks: Sequence[int],
    *,
    cuttable: Cuttable | None = None,
    compile: bool | Mapping[str, Any] = False,
    memory: Sequence[float] | None,
    optimizer_state: float,
    seconds: float,
    progress: Progress,
) -> Profile:
    """The costs of a module's layers on some devices, for each number of chunks that layers and memory allow.

    ``cuttable``: for a module that is cut by name; ``compile``: as for ``SplitPipe``.
    """
    groups = kinds_of(places)
    walks = len(groups) * len(chunks)
    work: Work
    if cuttable is None:
        assert isinstance(module, nn.Sequential)
        work = _LayersWork(module, sample, target, loss_fn, seconds, walks, progress, compile)
    else:
        work = ModuleWork(*cuttable, target, loss_fn, seconds, walks, progress, compile)
    kinds = []
    found: list[Measured] = []
    for name, members in groups.items():
        own = [places[row] for row in members]
        with shared_threads(len(members) if own[0].device.type == "cpu" else 1):
            measured = work.kind(own, chunks)
            with layers.measuring(own[0].device):
                between = gap(own[0], by_cuts=cuttable is not None)
        found = next(iter(measured.values()))
        costs = {count: tuple(each.layer for each in row) for count, row in measured.items()}
        kinds.append(Kind(name, costs, between, workspace(own[0].device)))
    if not set.intersection(*(set(kind.layers) for kind in kinds)):
        each = "; ".join(f"{kind.name}: {sorted(kind.layers)}" for kind in kinds)
        raise ValueError(
            f"no number of chunks can be run everywhere ({each}): expected one that can. Give more to choose from."
        )
    largest = max(layer.input for kind in kinds for row in kind.layers.values() for layer in row)
    home = {place: kind for kind, members in enumerate(groups.values()) for place in members}
    free = usable_bytes(module, places, memory)
    with layers.measuring(places[0].device):
        slowest = link(places, largest) if len(places) > 1 else Link()
    return Profile(
        names=work.names,
        parameters=tuple(each.parameters for each in found),
        state=tuple(each.state for each in found),
        kinds=tuple(kinds),
        devices=tuple(Device(str(place), home[row], free[row]) for row, place in enumerate(places)),
        link=slowest,
        optimizer_state=optimizer_state,
        tied=() if cuttable is not None else tuple(_tied(module)),
        blockwise=cuttable is not None,
        compile=compile,
        own_compute=sum(place.device.type == "cpu" for place in places) < 2,
    )


class _LayersWork(Work):
    """Measures copies of layers, one at a time."""

    def __init__(
        self, module: nn.Sequential, sample: Any, target: Any, loss_fn: Callable[..., Any] | None, seconds: float,
        walks: int, progress: Progress, compile: bool | Mapping[str, Any],
    ) -> None:
        super().__init__(list(module._modules), seconds, walks, progress)
        self._options = verify_compile(compile)
        self._module, self._sample, self._target, self._loss_fn = module, sample, target, loss_fn
        self._rows = batch_size(flatten(sample, "the sample", batch=True)[0])
        self._repeated = layers.repeated_state(module)

    def walk(self, places: Sequence[Place], chunks: int) -> list[Measured]:
        """The costs for one number of chunks."""
        [place, *_], names = places, self.names
        loss = self._loss(place, chunks)
        base = self._ends(place, chunks)
        compiler = Compiler(self._options)  # Copies of equal layers share compiled code, for these sizes.

        def measure(done: list[Measured], copied: nn.Module, flow: Flow) -> tuple[Measured, Flow]:
            at = len(done)
            self.progress(
                self.done, self.total,
                f"layer {names[at]} ({type(copied).__name__}), {counted(chunks, 'chunk')}, {place}",
            )
            arriving = layers.input_flow(copied, flow)
            compiler.compile([copied])
            probe = Probe(names[at], copied, arriving, place, chunks, loss=loss if at + 1 == len(names) else None)
            layer = self._layer(probe, base)
            self.done += 1
            sizes = [0, 0]
            for own, tensor in layers.state_of(copied):
                if own not in self._repeated[at]:
                    sizes[not tensor.requires_grad] += sum(memory_of(tensor).values())
            return Measured(layer, *sizes), layers.output_flow(flow, arriving, probe.after)

        sample = self._part(self._sample, chunks)
        return layers.measure_layers(self._module, sample, place.device, measure, f", with {counted(chunks, 'chunk')}")

    def _layer(self, probe: Probe, base: Times) -> Layer:
        if self._options is not None:
            with self.compiling():
                probe.first()
        took, recording = probe.first()
        if took > self.most * 1e3:
            times, ends = times_of(recording)[0], None
        else:
            ends = probe.saved_ends()
            end = self.until(1)
            times = probe.times(lambda done: done < RUNS or perf_counter() < end)
        if took < _LONG:
            times = times.less(base)
        if not any(x.requires_grad for x in probe.after.tensors()):
            times = Times(times.forward, 0.0, 0.0)  # Nothing runs backward here.
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
        with layers.measuring(place.device):  # A copy made in inference mode couldn't be saved for backward.
            if isinstance(loss_fn, nn.Module):
                loss_fn = layers.copy_of(loss_fn).to(place.device)
            target = Flow(self._part(self._target, chunks), {}).map(lambda x: x.detach().to(place.device, copy=True))
        return loss_fn, target.value

    def _part(self, value: Any, chunks: int) -> Any:
        """The first microbatch."""
        leaves, spec = flatten(value, "the sample", batch=True)
        count = cuts(self._rows, chunks)[0][1]
        return unflatten([leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves], spec)


def _tied(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Pairs of layers that share a parameter or buffer."""
    own = [{id(tensor) for _, tensor in layers.state_of(layer)} for layer in module.children()]
    return (pair for pair in combinations(range(len(own)), 2) if own[pair[0]] & own[pair[1]])


@contextmanager
def bar(shown: bool | None = None, file: TextIO | None = None) -> Iterator[Progress]:
    """A progress bar: one line on standard error, if that is a terminal, which is removed at the end of the block."""
    out = sys.stderr if file is None else file
    if out is None or not (out.isatty() if shown is None else shown):  # None if it was closed.
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
