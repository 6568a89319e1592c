"""Measures a module between its possible cuts, as stages of the real pipeline, for balance and planner.

    unit 0 ─ cut ─> unit 1 ─ cut ─> unit 2 ...       each a stage, on one device; F, B and W apart

The module is a copy. It is called as in training, on one microbatch after the other.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from splitpipe.balance.layers import Flow
from splitpipe.balance.survey import Batch, batch_of
from splitpipe.batch import outputs
from splitpipe.compiled.layers import rehearsing
from splitpipe.core.stream import Place
from splitpipe.core.tensors import memory_of, storage_of
from splitpipe.core.thread_state import Bound
from splitpipe.core.torch_private import tree_leaves
from splitpipe.piped import piped
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording.recording import Recording


class Times(NamedTuple):
    """Milliseconds of F, B and W."""

    forward: float
    backward_input: float
    backward_weight: float

    def less(self, other: Times) -> Times:
        """The differences; negative ones count as 0."""
        return Times(*(max(0.0, one - two) for one, two in zip(self, other)))


class UnitBytes(NamedTuple):
    """Bytes of a unit per microbatch."""

    saved: int  # By F, for backward.
    kept: int  # Of these, by W after B.
    input: int  # What a cut before it copies.
    shared: int  # What the unit before it saves too.
    trained: int  # Trained parameters.
    state: int  # Other parameters, and buffers.


class Units:
    """A module on devices with each unit as a stage; microbatches run one after the other, ``chunks`` per call."""

    def __init__(
        self, module: nn.Module, cuts: Sequence[str], places: Sequence[Place], chunks: int,
        loss_fn: Callable[..., Any] | None, compile: bool | Mapping[str, Any] = False,
    ) -> None:
        stages = range(len(cuts) + 1)
        placement = [stage * len(places) // len(stages) for stage in stages]
        rows: list[list[Op]] = [[] for _ in places]
        for i in range(chunks):
            for row, own in enumerate([[j for j in stages if placement[j] == row] for row in range(len(places))]):
                rows[row] += [Op("F", j, i) for j in own]
                rows[row] += [Op(kind, j, i) for j in reversed(own) for kind in ("B", "W")]
        self.schedule = Schedule([row for row in rows if row], placement)
        self._device = places[0].device
        self._free = isinstance(loss_fn, FreeLoss)
        kind = self._device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        self._cuts = list(cuts)
        self._module = module
        self._runtime = piped(
            module, cuts, devices=[place.device for place, row in zip(places, rows) if row], chunks=chunks,
            schedule=self.schedule, loss_fn=loss_fn, grad_scaler=torch.amp.GradScaler(kind) if half else None,
            compile=compile, reduction="mean",  # Only times are used.
            checkpoint=None, deferred_batch_norm=False, backward="split", stash_limit=None, batched=None, split=None,
            sample=None,
        ).runtime

    def step(self, batch: Batch, rows: int, target: object = None) -> Callable[[], None]:
        """Makes a step with the first rows of a batch; ``target`` has as many, and is made here for a free loss."""
        args, kwargs = batch.first(rows, self._device)
        if self._free:
            target = torch.zeros(rows)
        more = {} if target is None else {"target": target}

        def run() -> None:
            self._module(*args, **kwargs, **more)

        return run

    def recorded(self, run: Callable[[], None], go_on: Callable[[int], bool]) -> Recording:
        """Records steps as long as ``go_on`` returns true for their number."""
        done = 0
        with self._runtime.recording() as recording:
            while go_on(done):
                run()
                done += 1
        return recording

    def bytes(self, recording: Recording, run: Callable[[], None]) -> list[UnitBytes]:
        """The bytes of each unit, from a recording and one more step."""
        held = recording.held
        assert held is not None
        saved = held.changes(self.schedule)["F"]
        inputs, shared = self._crossing(run)
        return [
            UnitBytes(int(saved[j]), recording.kept[j], inputs[j], shared[j], *sizes)
            for j, sizes in enumerate(self._parameters())
        ]

    def _crossing(self, run: Callable[[], None]) -> tuple[list[int], list[int]]:
        """For each unit, the bytes of its arguments, and of what both it and the unit before it save."""
        living = {storage_of(x) for x in (*self._module.parameters(), *self._module.buffers())}
        saved: list[dict[int, int]] = [{} for _ in range(len(self._cuts) + 1)]
        inputs = [0] * len(saved)
        at = 0

        def entered(stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal at
            at = stage
            given = {(storage_of(x) or id(x)): x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            inputs[stage] = sum(size for key, size in given.items() if key not in living)

        def pack(x: Tensor) -> Tensor:
            if storage_of(x) and storage_of(x) not in living:
                saved[at][storage_of(x)] = x.untyped_storage().nbytes()
            return x.detach()

        handles = [
            self._module.get_submodule(name).register_forward_pre_hook(
                lambda block, args, kwargs, stage=j + 1: entered(stage, args, kwargs), with_kwargs=True
            )
            for j, name in enumerate(self._cuts)
        ]
        try:
            # The hooks above can't be compiled: compiled blocks run uncompiled here.
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Bound(rehearsing, True):
                run()
        finally:
            for handle in handles:
                handle.remove()
        return inputs, [0, *(sum(two[key] for key in one.keys() & two.keys()) for one, two in pairwise(saved))]

    def _parameters(self) -> list[tuple[int, int]]:
        """For each unit, the bytes of its trained parameters and of its other state; shared state counts once."""
        sizes = [[0, 0] for _ in range(len(self._cuts) + 1)]
        seen: set[int] = set()
        stages = self._runtime.stage_of
        for part in self._module.modules():
            for x in (*part._parameters.values(), *part._buffers.values()):
                if x is not None and id(x) not in seen and part in stages:
                    seen.add(id(x))
                    sizes[stages[part]][not x.requires_grad] += sum(memory_of(x).values())
        return [(trained, state) for trained, state in sizes]


def times_of(recording: Recording) -> list[Times]:
    """The times of each stage's ops."""
    times = recording.costs().times(recording.schedule)
    return [Times(*each) for each in zip(times["F"], times["B"], times["W"])]


def overhead(place: Place, steps: int) -> Times:
    """The times of a unit that computes nothing."""
    units = Units(Chain(*(nn.Identity() for _ in range(5))), ["1", "2", "3", "4"], [place], 1, FreeLoss())
    step = units.step(batch_of(nn.Identity(), torch.zeros(1, 1, requires_grad=True)), 1)
    return times_of(units.recorded(step, lambda done: done < steps))[2]


class Chain(nn.Sequential):
    """Layers in a row, called by a custom forward, so that they can be cut by name like any module."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class FreeLoss:
    """A loss that costs nothing: the gradients for all tensors that require grad are made in advance."""

    def __init__(self) -> None:
        self._grads: list[Tensor] = []

    def __call__(self, output: Any, target: object) -> Tensor:
        leaves = output.tensors() if isinstance(output, Flow) else outputs.flatten(output)[0]
        found = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        if [x.shape for x in self._grads] != [x.shape for x in found]:
            self._grads = [torch.ones_like(x) for x in found]
        if not found:
            return torch.zeros(())
        loss: Tensor = _GivenGradients.apply(self._grads, *found)
        return loss


class _GivenGradients(Function):
    """Zero; its backward returns the given gradients."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.grads
