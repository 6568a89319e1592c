"""Layers as a stage of their own, which is run and recorded as any stage is.

    Before ──> layers ──> After ──> loss        one stage, one device; F, B and W apart
      a row of the input is a whole microbatch of the layer's

What flows between layers need not agree in its first dimension, as a batch's tensors must: each travels with one more
dimension before its own, and the layer gets it without.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from splitpipe.balance.layers import Flow, synchronize
from splitpipe.core.stream import Place
from splitpipe.core.tensors import storage_of
from splitpipe.pipe import SplitPipe
from splitpipe.planner.layers import BALLAST, After, Before, Nothing, Own, bytes_of, rows_of, size_of
from splitpipe.planner.profile import Layer
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.skip.pairs import pops, stashes

Named = tuple[str, nn.Module]
#: A loss function, and the target of a microbatch.
Loss = tuple[Callable[..., Any], object]
#: Microbatches of one run, at most. In training too, the first one's W makes the gradient and the others' add to it.
ROWS = 4


class Times(NamedTuple):
    """Milliseconds of F, B and W."""

    forward: float
    backward_input: float
    backward_weight: float


class Probe:
    """Layers with all that they are measured by.

    Args:
        layers: copies, on the device, with their names.
        flow: what they take.
        place: where it computes.
        chunks: that the batch is cut into.
        loss: a function of the output and a target, and the target; None: a loss that costs nothing, of all that the
            layers give.
        stages: 1, or one for each layer.

    Attributes:
        flow: what the layers take.
        chunks: that the batch is cut into.
        after: what the layers gave in their first run.
        input: bytes of what they take.
    """

    def __init__(
        self, layers: Sequence[Named], flow: Flow, place: Place, chunks: int, loss: Loss | None = None,
        stages: int = 1,
    ) -> None:
        taken = {key for _, layer in layers for key in pops(layer)}
        leaves, spec = tree_flatten((flow.value, dict(flow.skips)))
        self.flow, self.chunks = flow, chunks
        self._given = layers, flow, place, chunks, loss
        self._place = place
        self._rows = min(chunks, ROWS)
        self._leaves = leaves
        self._before = Before(list(flow.skips), spec)
        self._after = After([key for _, layer in layers for key in stashes(layer) if key not in taken])
        self.input = sum(size_of(x) for x in leaves if isinstance(x, Tensor))
        module = nn.Sequential()
        module._modules.update({"(before)": self._before, **dict(layers), "(after)": self._after})
        device: torch.device | torch.Stream = place.device if place.stream is None else place.stream
        kind = place.device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        self._model = SplitPipe(
            module, _balance(len(layers), stages), devices=[device], chunks=self._rows,
            schedule=_in_turn(stages, self._rows),
            loss_fn=Nothing() if loss is None else Own(*loss),
            grad_scaler=torch.amp.GradScaler(kind) if half else None,
        )

    @property
    def after(self) -> Flow:
        found = self._after.found
        assert found is not None
        return found

    def first(self) -> tuple[float, Recording]:
        """The first run, of one microbatch: milliseconds of it all, and the recording, with what it held."""
        self._before.copying = self._after.noting = True
        begun = perf_counter()
        with self._model.record() as recording:
            self._run(1)
            synchronize(self._place.device)
        self._before.copying = self._after.noting = False
        return (perf_counter() - begun) * 1e3, recording

    def warm(self) -> float:
        """A run of one microbatch that does not count: milliseconds."""
        begun = perf_counter()
        self._run(1)
        synchronize(self._place.device)
        return (perf_counter() - begun) * 1e3

    def saving(self) -> tuple[int, int]:
        """One more run: of what the layer saves, the bytes of its input and those of its output."""
        found: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            found[storage_of(x)] = bytes_of(x)
            return x.detach()

        self._before.marking = self._after.marking = True
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            self._run(1)
        self._before.marking = self._after.marking = False
        given, made = self._before.marked, self._after.marked - self._before.marked
        return sum(found[key] for key in given & found.keys()), sum(found[key] for key in made & found.keys())

    def apart(self) -> Probe:
        """The same layers, a stage each."""
        return Probe(*self._given, stages=len(self._given[0]))

    def times(self, go_on: Callable[[int], bool]) -> list[Times]:
        """What F, B and W take in each stage: medians.

        Args:
            go_on: called with the number of microbatches measured so far: whether there are to be more.
        """
        done = 0
        with self._model.record() as recording:
            while go_on(done):
                self._run(self._rows)
                done += self._rows
        return times_of(recording)

    def burden(self, ended: threading.Event) -> None:
        """Runs until somebody else has ended, and measures nothing."""
        while not ended.is_set():
            self._run(self._rows)

    def _run(self, rows: int) -> None:
        device = self._place.device
        # At least one tensor tells how many rows there are.
        leaves = [torch.zeros(rows, device=device), *(rows_of(leaf, rows) for leaf in self._leaves)]
        self._model(leaves, target=torch.zeros(rows, device=device))


def _balance(layers: int, stages: int) -> list[int]:
    """Layers of each stage, with those before and after."""
    each = [1] * stages if stages > 1 else [layers]
    each[0] += 1
    each[-1] += 1
    return each


def _in_turn(stages: int, chunks: int) -> Schedule:
    """One microbatch after the other, through all stages and back."""
    row = []
    for number in range(chunks):
        row += [Op("F", stage, number) for stage in range(stages)]
        row += [Op("B", stage, number) for stage in reversed(range(stages))]
        row += [Op("W", stage, number) for stage in reversed(range(stages))]
    return Schedule([row], [0] * stages)


def times_of(recording: Recording) -> list[Times]:
    """What the ops of each stage took."""
    times = recording.costs().times(recording.schedule)
    return [Times(*each) for each in zip(times["F"], times["B"], times["W"])]


def held_of(recording: Recording) -> tuple[int, int]:
    """Bytes that the first run held: all, and what W needs of them or apart from them."""
    held = recording.held
    if held is None:
        return 0, 0
    saved, kept = (
        value if isinstance(value, (int, float)) else value[0] for value in (held.forward, held.backward_weight)
    )
    return int(saved) % BALLAST, int(kept)


def sized(probe: Probe, recording: Recording, saving: tuple[int, int] | None, times: Times) -> Layer:
    """What the layer takes, put together.

    Args:
        probe: of it.
        recording: of the first run.
        saving: what of the memory is input and output; None: nobody looked.
        times: that were measured.
    """
    saved, kept = held_of(recording)
    if not any(x.requires_grad for x in probe.after.tensors()):
        times = Times(times.forward, 0.0, 0.0)  # Nothing goes backward here.
    entered, left = (min(probe.input, saved), 0) if saving is None else saving
    return Layer(*times, saved=saved, kept=kept, input=probe.input, saved_input=entered, saved_output=left)
