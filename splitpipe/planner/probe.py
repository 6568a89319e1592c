"""A layer as a separate stage, which is run and recorded like any stage.

    InputLayer ──> layer ──> OutputLayer ──> loss        one stage, one device; F, B and W apart
      a row of the input is a whole microbatch of the layer's

Tensors between layers may have different first dimensions; those of a batch may not. So the probe adds a dimension of
microbatches in front of each tensor's dimensions, and InputLayer removes it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.balance.layers import Flow, detached_as, synchronize
from splitpipe.balance.units import FreeLoss, Times, times_of
from splitpipe.core.stream import Place
from splitpipe.core.tensors import memory_of, storage_of
from splitpipe.core.torch_private import tree_flatten, tree_unflatten
from splitpipe.pipe import SplitPipe
from splitpipe.planner.profile import Layer
from splitpipe.planner.work import ROWS
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.skip.box import Key, current
from splitpipe.skip.pairs import pops, stashes
from splitpipe.skip.skippable import Skippable

# A loss function, and the target of a microbatch.
Loss = tuple[Callable[..., Any], object]


class Probe:
    """A copy of a layer as a separate stage; without ``loss``, the loss costs nothing."""

    def __init__(
        self, name: str, layer: nn.Module, flow: Flow, place: Place, chunks: int, loss: Loss | None = None
    ) -> None:
        self._device = place.device
        self._rows = min(chunks, ROWS)
        self._leaves, spec = tree_flatten((flow.value, dict(flow.skips)))
        self._input = InputLayer(list(flow.skips), spec)
        taken = set(pops(layer))
        self._output = OutputLayer([key for key in stashes(layer) if key not in taken])
        module = nn.Sequential()
        module._modules.update({"(input)": self._input, name: layer, "(output)": self._output})
        kind = place.device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        order = [Op(letter, 0, number) for number in range(self._rows) for letter in ("F", "B", "W")]
        self._model = SplitPipe(
            module, [3], devices=[place.device], chunks=self._rows, schedule=Schedule([order], [0]),
            loss_fn=FreeLoss() if loss is None else UserLoss(*loss),
            grad_scaler=torch.amp.GradScaler(kind) if half else None, reduction="mean",  # Only times are used.
        )

    @property
    def after(self) -> Flow:
        """The layer's output in its first run."""
        assert self._output.found is not None
        return self._output.found

    def first(self) -> tuple[float, Recording]:
        """The first run, of one microbatch: its total milliseconds, and the recording, with its bytes."""
        self._input.first = self._output.first = True
        begun = perf_counter()
        with self._model.record() as recording:
            self._run(1)
            synchronize(self._device)
        self._input.first = self._output.first = False
        return (perf_counter() - begun) * 1e3, recording

    def saved_ends(self) -> tuple[int, int]:
        """Runs again; returns the bytes of the layer's input, and of its output, among those that it saves."""
        found: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            found[storage_of(x)] = x.untyped_storage().nbytes() if storage_of(x) else _size(x)
            return x.detach()

        self._input.marking = self._output.marking = True
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            self._run(1)
        self._input.marking = self._output.marking = False
        given, made = self._input.storages, self._output.storages - self._input.storages
        return sum(found[key] for key in given & found.keys()), sum(found[key] for key in made & found.keys())

    def times(self, go_on: Callable[[int], bool]) -> Times:
        """The medians of F, B and W, from runs while ``go_on``, given the number of microbatches so far, is true."""
        done = 0
        with self._model.record() as recording:
            while go_on(done):
                self._run(self._rows)
                done += self._rows
        return times_of(recording)[0]

    def sizes(self, recording: Recording, ends: tuple[int, int] | None) -> Layer:
        """The bytes of the first run, as a layer without times; ``ends`` as from ``saved_ends``, if that was run."""
        saved = 0 if recording.held is None else int(recording.held.changes(recording.schedule)["F"][0])
        taken = sum(_size(x) for x in self._leaves if isinstance(x, Tensor))
        entered, left = (min(taken, saved), 0) if ends is None else ends
        kept = sum(recording.kept)
        return Layer(0.0, 0.0, 0.0, saved=saved, kept=kept, input=taken, saved_input=entered, saved_output=left)

    def _run(self, rows: int) -> None:
        # At least one tensor must show the number of rows.
        leaves = (torch.zeros(rows, device=self._device), *(_stacked(leaf, rows) for leaf in self._leaves))
        self._model(leaves, target=torch.zeros(rows, device=self._device))


def _size(x: Tensor) -> int:
    """Bytes of a copy of a tensor."""
    return x.nbytes if x.layout is torch.strided else sum(memory_of(x).values())


class _Whole:
    """Wraps a tensor that can't be a row of another, such as a sparse one: every microbatch has the whole."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = lambda: tensor


def _stacked(leaf: Any, rows: int) -> Any:
    """Copies of a tensor as the ``rows`` rows of one tensor; other values as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.no_grad():
        one = leaf.detach().clone()
        if type(one) is not Tensor or one.layout is not torch.strided or one.is_nested:
            return _Whole(detached_as(leaf, one))
        many = one.new_empty_strided((rows, *one.shape), (one.numel(), *one.stride())).copy_(one)
    return detached_as(leaf, many)


class InputLayer(Skippable):
    """Returns the layer's input, and stashes the skips that it pops."""

    def __init__(self, keys: Sequence[Key], spec: Any) -> None:
        nn.Module.__init__(self)
        self._keys, self._spec = list(keys), spec
        self.first = self.marking = False
        self.storages: set[int] = set()  # The storages of its tensors, if they are to be marked.

    def stashable(self) -> list[Key]:
        return self._keys

    def forward(self, input: Any) -> Any:
        leaves = [self._row(leaf) for leaf in input[1:]]
        if self.marking:
            self.storages = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)} - {0}
        value, skips = tree_unflatten(leaves, self._spec)
        current().update(skips)
        return value

    def _row(self, leaf: Any) -> Any:
        if isinstance(leaf, _Whole):
            return leaf.tensor()
        if not isinstance(leaf, Tensor):
            return leaf
        # A separate copy counts when it is saved; the batch's memory wouldn't.
        return leaf.squeeze(0).clone() if self.first else leaf.squeeze(0)


class OutputLayer(Skippable):
    """Takes the layer's output and the skips that it stashed."""

    def __init__(self, keys: Sequence[Key]) -> None:
        nn.Module.__init__(self)
        self._keys = list(keys)
        self.first = self.marking = False
        self.storages: set[int] = set()
        self.found: Flow | None = None

    def poppable(self) -> list[Key]:
        return self._keys

    def forward(self, input: Any) -> Flow:
        flow = Flow(input, {key: current().pop(key) for key in self._keys})
        if self.first:
            self.found = flow.map(lambda x: detached_as(x, x))
        if self.marking:
            self.storages = {storage_of(x) for x in flow.tensors()} - {0}
        return flow


class UserLoss(nn.Module):
    """The user's loss of the layer's output; a module, because the loss may be one."""

    def __init__(self, loss_fn: Callable[..., Any], target: object) -> None:
        super().__init__()
        self.loss_fn, self.target = loss_fn, target

    def forward(self, flow: Flow, target: object) -> Any:
        return self.loss_fn(flow.value, self.target)
