"""The work of measuring a model on a kind of device, for some numbers of chunks.

    for each kind of device, for each number of chunks:
        a copy of each layer of an nn.Sequential, alone, or
        a copy of any other module with all its possible cuts, on one device or on all of the kind
"""
from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from splitpipe.balance.copies import copy_of, measuring
from splitpipe.balance.layers import Layers, Single, detached, first_rows
from splitpipe.balance.survey import Surveyed
from splitpipe.balance.units import ROWS, Times, UnitBytes, Units, overhead, times_of
from splitpipe.compiled.layers import Compiler, release
from splitpipe.compiled.options import verify_compile
from splitpipe.core.microbatch import cuts
from splitpipe.core.stream import Place
from splitpipe.core.tensors import Address
from splitpipe.planner.profile import Layer
from splitpipe.schedule.plurals import counted

# Called with the number of layers done, their total number, and the name of the next.
Progress = Callable[[int, int, str], None]
# The fewest microbatches that count, for what is run more than once.
RUNS = 3


@dataclass
class Work:
    """Measurements that share a time limit, which excludes the time for compiling."""

    of: Layers | Surveyed
    target: Any
    loss_fn: Callable[..., Any] | None
    seconds: float
    walks: int  # How often all layers are measured.
    progress: Progress
    compile: bool | Mapping[str, Any] = False  # As for ``SplitPipe``.

    def __post_init__(self) -> None:
        self.end = perf_counter() + self.seconds
        self.total, self.done = self.walks * len(self.of.names), 0

    def kind(self, places: Sequence[Place], chunks: Sequence[int]) -> dict[int, list[Layer]]:
        """The costs of the layers on a kind of device, for each number of chunks with which they can be run."""
        found: dict[int, list[Layer]] = {}
        for number, count in enumerate(chunks):
            before = self.done
            try:
                found[count] = self.walk(places, count)
            except Exception as error:
                # Fewer rows than a layer needs, or more than the device has memory for.
                if not found and not (isinstance(error, torch.OutOfMemoryError) and number + 1 < len(chunks)):
                    raise
                traceback.clear_frames(error.__traceback__)  # They refer to the tensors that didn't fit.
                self.done = before + len(self.of.names)
        return found

    def walk(self, places: Sequence[Place], chunks: int) -> list[Layer]:
        """The costs for one number of chunks."""
        if isinstance(self.of, Layers):
            return self._layers(self.of, places[0], chunks)
        return self._module(self.of, places, chunks)

    def tell(self, what: str) -> None:
        """Shows what is measured next."""
        self.progress(self.done, self.total, what)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Excludes the block's time from the limit."""
        begun = perf_counter()
        yield
        self.end += perf_counter() - begun

    def loss(self, device: torch.device, chunks: int) -> tuple[Callable[..., Any] | None, Any]:
        """The loss function, and the target of a microbatch, on a device."""
        loss_fn: Any = self.loss_fn
        if loss_fn is None:
            return None, None
        with measuring(device):  # A copy made in inference mode couldn't be saved for backward.
            if isinstance(loss_fn, nn.Module):
                loss_fn = copy_of(loss_fn).to(device)
            rows = cuts(self.of.rows, chunks)[0][1]
            return loss_fn, detached(first_rows(self.target, rows), device)

    def again(self, took: float, layers: int) -> bool:
        """True if a run of some layers, which took ``took`` seconds, is short enough to be repeated."""
        # If all took longer, running all of them a second time would take half of the time.
        return took <= self.seconds / 2 / len(self.of.names) * layers

    def measured(
        self, units: Units, chunks: int, empty: Sequence[Times], left: Callable[[], Mapping[Address, int]] = dict
    ) -> list[tuple[Times, UnitBytes]]:
        """The times and bytes of units, compared with empty ones: of one run, or of as many as there is time for."""
        begun = perf_counter()
        recording = units.recorded()
        took = perf_counter() - begun
        sizes = units.bytes(recording, left())
        if self.again(took, len(sizes)):
            now = perf_counter()
            end = now + max(0.0, self.end - now) * len(sizes) / (self.total - self.done)
            recording = units.recorded(lambda done: done < RUNS or perf_counter() < end, min(chunks, ROWS))
        self.done += len(sizes)
        return [(times.less(base), size) for times, base, size in zip(times_of(recording), empty, sizes)]

    def _layers(self, of: Layers, place: Place, chunks: int) -> list[Layer]:
        """Those of the layers of an nn.Sequential, one at a time."""
        loss_fn, target = self.loss(place.device, chunks)
        with measuring(place.device):
            empty = overhead(place, 1, min(chunks, ROWS))
        options = verify_compile(self.compile)
        compiler = Compiler(options)  # Copies of equal layers share compiled code, for these sizes.

        def measure(at: int, single: Single) -> Layer:
            name, kind = of.names[at], type(single.layer).__name__
            self.tell(f"layer {name} ({kind}), {counted(chunks, 'chunk')}, {place}")
            compiler.compile([single.layer])
            units = single.units(place, loss_fn, target) if at + 1 == len(of.names) else single.units(place)
            if options is not None:
                with self.compiling():
                    units.run()
                single.leaving = None
            [(times, size)] = self.measured(units, chunks, empty, lambda: single.left().memory())
            return Layer(*single.trained(times), *size, *single.state())

        return of.measured(place.device, measure, chunks)

    def _module(self, of: Surveyed, places: Sequence[Place], chunks: int) -> list[Layer]:
        """Those of a module's parts, on one device, or, if it doesn't fit, on all of a kind."""
        release(of.module)  # It is compiled again for these sizes, as it would be in training.
        self.tell(f"{type(of.module).__name__}, {counted(chunks, 'chunk')}, {places[0]}")
        try:
            return self._parts(of, places[:1], chunks)
        except torch.OutOfMemoryError as error:
            if len({each.device for each in places}) == 1:
                raise
            traceback.clear_frames(error.__traceback__)
        return self._parts(of, places, chunks)

    def _parts(self, of: Surveyed, places: Sequence[Place], chunks: int) -> list[Layer]:
        def measure(units: Units) -> list[Layer]:
            with self.compiling():
                units.discover()
                units.run()
            found = self.measured(units, chunks, overhead(places[0], len(of.names), min(chunks, ROWS)))
            return [Layer(*times, *size, *state) for (times, size), state in zip(found, units.state())]

        loss_fn, target = self.loss(places[-1].device, chunks)
        return of.measured(places, measure, chunks, loss_fn, target, self.compile)
