"""The measuring rig: the units of a copy of a module, as stages of the real pipeline, for balance and planner.

    unit 0 ─ cut ─> unit 1 ─ cut ─> unit 2 ...       each a stage, on one device; F, B and W apart

It is called as in training, on one microbatch after the other. A layer of an nn.Sequential is a module of one unit.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from splitpipe.batch import outputs
from splitpipe.compiled.layers import rehearsing
from splitpipe.core.stream import Place
from splitpipe.core.tensors import Address, memory_of
from splitpipe.core.thread_state import Bound
from splitpipe.core.torch_private import tree_leaves, tree_map_only
from splitpipe.piped import Given, piped
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording.recording import Recording

#: The most microbatches of one run. As in training, the first one's W makes the gradient and the others add to it.
ROWS = 4
#: Runs without anything to compute, to measure what a unit costs anyway.
EMPTY = 30


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
    saved_input: int  # What it saves of its input: of a unit after a cut, what the unit before it saves too.
    saved_output: int  # Likewise, of its output.


class Units:
    """A module on devices with each unit as a stage, called with some arguments again and again.

    Args:
        module: a copy, which may be trained.
        cuts: the names of the blocks with which units 1, 2, ... start.
        places: those of the units, in order.
        loss_fn: None for the module's own loss.
        call: the positional and keyword arguments for a microbatch.
        target: the microbatch's target, for ``loss_fn``.
        compile: as for ``SplitPipe``.
    """

    def __init__(
        self, module: nn.Module, cuts: Sequence[str], places: Sequence[Place], loss_fn: Callable[..., Any] | None,
        call: tuple[tuple[Any, ...], dict[str, Any]], target: Any = None, compile: bool | Mapping[str, Any] = False,
    ) -> None:
        stages = range(len(cuts) + 1)
        placement = [stage * len(places) // len(stages) for stage in stages]
        rows: list[list[Op]] = [[] for _ in places]
        for i in range(ROWS):
            for row, own in enumerate([[j for j in stages if placement[j] == row] for row in range(len(places))]):
                rows[row] += [Op("F", j, i) for j in own]
                rows[row] += [Op(kind, j, i) for j in reversed(own) for kind in ("B", "W")]
        self.schedule = Schedule([row for row in rows if row], placement)
        self._module, self._cuts = module, list(cuts)
        self._entered: list[dict[Address, int]] = []  # The memory of the arguments of units 1, 2, ...
        self.call = Call(*call, {} if target is None else {"target": target})
        kind = places[0].device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        given = Given(
            devices=[place.device for place, row in zip(places, rows) if row], chunks=ROWS, schedule=self.schedule,
            loss_fn=loss_fn, grad_scaler=torch.amp.GradScaler(kind) if half else None, compile=compile,
            reduction="mean",  # Only times are used.
            checkpoint=None, deferred_batch_norm=False, backward="split", stash_limit=None, split=self.call.split,
        )
        self._runtime = piped(module, cuts, given).runtime
        # A layer of an nn.Sequential may keep what it computed in attributes.
        self._runtime.attributes.looked = set() if cuts else {True, False}

    def run(self, rows: int = 1) -> None:
        """Runs ``rows`` microbatches."""
        self.call.rows = rows
        self._module(*self.call.args, **self.call.kwargs, **self.call.target)

    def discover(self) -> None:
        """The first run, which shows what enters each unit. Blocks that are to be compiled run uncompiled."""
        entered = self._entered = [{} for _ in self._cuts]
        handles = [
            self._module.get_submodule(name).register_forward_pre_hook(
                lambda block, args, kwargs, own=own: own.update(memory_of(*_tensors((args, kwargs)))), with_kwargs=True
            )
            for own, name in zip(entered, self._cuts)
        ]
        try:
            with Bound(rehearsing, True):
                self.run()
        finally:
            for handle in handles:
                handle.remove()

    def recorded(self, go_on: Callable[[int], bool] = lambda done: not done, rows: int = 1) -> Recording:
        """Records runs as long as ``go_on`` returns true for the number of microbatches; by default, a single one."""
        done = 0
        with self._runtime.recording() as recording:
            while go_on(done):
                self.run(rows)
                done += rows
        return recording

    def saved(self, recording: Recording) -> list[dict[Address, int]]:
        """What F of each unit saved for backward in the first recorded run, other than parameters and buffers."""
        return [*map(self._passing, recording.saved)]

    def bytes(self, recording: Recording, left: Iterable[Address] = ()) -> list[UnitBytes]:
        """The bytes of each unit in the first recorded run; ``left``: the memory of the last one's output."""
        given = [*map(self._passing, [memory_of(*self.call.latest), *self._entered])]
        saved = self.saved(recording)
        last = {*left} - given[-1].keys()
        before = [_common(saved[0], given[0]), *(_common(two, one) for one, two in pairwise(saved))]
        after = [*before[1:], _common(saved[-1], last)]
        return [
            UnitBytes(sum(own.values()), kept, sum(entered.values()), *ends)
            for own, kept, entered, *ends in zip(saved, recording.kept, given, before, after)
        ]

    def state(self) -> list[tuple[int, int]]:
        """For each unit, the bytes of its trained parameters and of its other state; shared state counts once."""
        found: list[list[Tensor]] = [[] for _ in range(len(self._cuts) + 1)]
        seen: set[int] = set()
        stages = self._runtime.stage_of
        for part in self._module.modules():
            for x in (*part._parameters.values(), *part._buffers.values()):
                if x is not None and id(x) not in seen and part in stages:
                    seen.add(id(x))
                    found[stages[part]].append(x)
        return [state_bytes(each) for each in found]

    def _passing(self, memory: Mapping[Address, int]) -> dict[Address, int]:
        """What isn't a parameter's or buffer's."""
        living = memory_of(*self._module.parameters(), *self._module.buffers())
        return {key: size for key, size in memory.items() if key not in living}


class Call:
    """A call that is made again and again; it doesn't refer to the module, which would then be part of a cycle."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: dict[str, Any]) -> None:
        self.args, self.kwargs, self.target = args, kwargs, target
        #: The number of microbatches.
        self.rows = 1
        #: The tensors among the arguments of the latest call's first microbatch.
        self.latest: list[Tensor] = []

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> list[Any]:
        """The arguments of each microbatch: copies of those of the call."""
        found = [tree_map_only(Tensor, _copy, (args, kwargs)) for _ in range(self.rows)]
        args, kwargs = found[0]
        self.latest = _tensors((args, {name: x for name, x in kwargs.items() if name not in self.target}))
        return found


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _common(saved: Mapping[Address, int], others: Iterable[Address]) -> int:
    return sum(saved[key] for key in saved.keys() & others)


def state_bytes(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """The bytes of trained parameters, and of other state."""
    sizes = [0, 0]
    for x in tensors:
        sizes[not x.requires_grad] += sum(memory_of(x).values())
    return sizes[0], sizes[1]


def times_of(recording: Recording) -> list[Times]:
    """The times of each stage's ops."""
    times = recording.costs().times(recording.schedule)
    return [Times(*each) for each in zip(times["F"], times["B"], times["W"])]


def overhead(place: Place, count: int, rows: int = 1) -> list[Times]:
    """The times of ``count`` units that compute nothing, in runs of ``rows`` microbatches."""
    few = min(count, 5)  # Units in the middle take equally long.
    x = torch.zeros(1, 1, device=place.device, requires_grad=True)
    chain = Chain(*(nn.Identity() for _ in range(few)))
    units = Units(chain, [*map(str, range(1, few))], [place], FreeLoss(), ((x,), {}), target=0)
    units.run()
    first, *middle = times_of(units.recorded(lambda done: done < EMPTY * rows, rows))
    return [first, *middle[1:2] * (count - few), *middle]


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
        found = [x for x in outputs.flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
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
