"""The work of measuring a model on a kind of device, for some numbers of chunks; and that for a module with cuts."""
from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.balance import layers
from splitpipe.balance.layers import Flow
from splitpipe.balance.survey import Batch
from splitpipe.balance.units import FreeLoss, Units, overhead, times_of
from splitpipe.compiled.layers import release
from splitpipe.core.microbatch import cuts, flatten, unflatten
from splitpipe.core.note import add_note
from splitpipe.core.stream import Place
from splitpipe.planner.profile import Layer
from splitpipe.schedule.plurals import counted

# Called with the number of layers done, their total number, and the name of the next.
Progress = Callable[[int, int, str], None]
# The most microbatches of one run. As in training, the first one's W makes the gradient and the others add to it.
ROWS = 4
# The fewest microbatches that count, for what is run more than once.
RUNS = 3
# The name of the part before the first cut.
START = "(start)"


class Measured(NamedTuple):
    layer: Layer
    parameters: int  # Bytes.
    state: int


class Work:
    """Measurements that share a time limit, which excludes the time for compiling."""

    def __init__(self, names: Sequence[str], seconds: float, walks: int, progress: Progress) -> None:
        self.names = tuple(names)
        self.end = perf_counter() + seconds
        # Longer ones are run only once: running all of them a second time would take half of the time.
        self.most = seconds / 2 / len(names)
        self.total, self.done = walks * len(names), 0
        self.progress = progress

    def kind(self, places: Sequence[Place], chunks: Sequence[int]) -> dict[int, list[Measured]]:
        """The costs of the layers on a kind of device, for each number of chunks with which they can be run."""
        found: dict[int, list[Measured]] = {}
        for number, count in enumerate(chunks):
            before = self.done
            try:
                found[count] = self.walk(places, count)
            except Exception as error:
                # Fewer rows than a layer needs, or more than the device has memory for.
                if not found and not (isinstance(error, torch.OutOfMemoryError) and number + 1 < len(chunks)):
                    raise
                traceback.clear_frames(error.__traceback__)  # They refer to the tensors that didn't fit.
                self.done = before + len(self.names)
        return found

    def walk(self, places: Sequence[Place], chunks: int) -> list[Measured]:
        """The costs for one number of chunks."""
        raise NotImplementedError

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Excludes the block's time from the limit."""
        begun = perf_counter()
        yield
        self.end += perf_counter() - begun

    def until(self, units: int) -> float:
        """The time until which the next ``units`` layers may run."""
        now = perf_counter()
        return now + max(0.0, self.end - now) * units / (self.total - self.done)


class Cuttable(NamedTuple):
    """A copy of a module that is cut by name."""

    module: nn.Module
    batch: Batch
    blocks: Sequence[str]
    dropin: bool


class ModuleWork(Work):
    """Measures a copy of a module with all possible cuts, on one device, or, if it doesn't fit, on all of a kind."""

    def __init__(
        self, module: nn.Module, batch: Batch, blocks: Sequence[str], dropin: bool, target: Any,
        loss_fn: Callable[..., Any] | None, seconds: float, walks: int, progress: Progress,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        super().__init__([START, *blocks], seconds, walks, progress)
        self._compile = compile
        self._module, self._batch, self._cuts = module.train(), batch, list(blocks)
        self._target, self._loss_fn, self._dropin = target, loss_fn, dropin

    def walk(self, places: Sequence[Place], chunks: int) -> list[Measured]:
        """The costs for one number of chunks."""
        release(self._module)  # It is compiled again for these sizes, as it would be in training.
        place, what = places[0], f"{type(self._module).__name__}, {counted(chunks, 'chunk')}, {places[0]}"
        self.progress(self.done, self.total, what)
        try:
            with layers.measuring(place.device):
                try:
                    found = self._measured([place], chunks)
                except torch.OutOfMemoryError as error:
                    if len({each.device for each in places}) == 1:
                        raise
                    traceback.clear_frames(error.__traceback__)
                    found = self._measured(places, chunks)
        except BaseException as error:
            add_note(error, f"Raised while profiling {what}, in a copy. The model is unchanged.")
            raise
        finally:
            torch.clear_autocast_cache()
        self.done += len(self.names)
        return found

    def _measured(self, places: Sequence[Place], chunks: int) -> list[Measured]:
        rows = cuts(self._batch.rows, chunks)[0][1]
        several = min(ROWS, self._batch.rows // rows)
        home = places[-1].device
        loss_fn: Any = FreeLoss() if self._dropin else self._loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn = layers.copy_of(loss_fn).to(home)
        units = Units(self._module, self._cuts, places, 1, loss_fn, self._compile)
        run = units.step(self._batch, rows, self._first(rows, home))
        with self.compiling():
            run()  # Finds the stages' modules, and warms up.
        begun = perf_counter()
        recording = units.recorded(run, lambda done: not done)
        took = perf_counter() - begun
        sizes = units.bytes(recording, run)
        if took <= self.most * len(self.names):
            units = Units(self._module, self._cuts, places, several, loss_fn, self._compile)
            run = units.step(self._batch, rows * several, self._first(rows * several, home))
            run()
            end = self.until(len(self.names))
            recording = units.recorded(run, lambda done: done * several < RUNS or perf_counter() < end)
        base = overhead(places[0], 6 * ROWS)
        shared = [*(size.shared for size in sizes), 0]
        return [
            Measured(
                Layer(
                    *times.less(base), saved=size.saved, kept=size.kept, input=size.input, saved_input=size.shared,
                    saved_output=after,
                ),
                size.trained, size.state,
            )
            for times, size, after in zip(times_of(recording), sizes, shared[1:])
        ]

    def _first(self, rows: int, device: torch.device) -> Any:
        """The target's first rows, copied to a device."""
        if self._target is None:
            return None
        leaves, spec = flatten(self._target, "the target", batch=True)
        parts = [leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
        return Flow(unflatten(parts, spec), {}).map(lambda x: x.detach().to(device, copy=True)).value
