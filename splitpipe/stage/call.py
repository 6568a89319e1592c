"""One call of the model: its microbatches, the caller's state and streams, its seeds.

    begin      split the batch, make the stages' streams wait for the caller's
    ...        the stages run
    rejoin     make the caller's streams wait for the stages'
    ...        the output or the loss is put together
    end        update the statistics of deferred BatchNorm and the random state: nothing can fail any more
"""
from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from splitpipe.batch.division import Division
from splitpipe.batch.moving import Moves
from splitpipe.batchnorm import Statistics
from splitpipe.core import microbatch, stream
from splitpipe.core.generator import Seeds
from splitpipe.core.stream import Stream
from splitpipe.core.tensors import sharing
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import TreeSpec
from splitpipe.core.transfer import hand_over
from splitpipe.stage.checkpoint import Batch


@dataclass
class Activation:
    """A value on its way between stages: its leaves, their nesting, and which share memory with others on their way."""

    leaves: list[Any]
    spec: TreeSpec
    shared: frozenset[int] = frozenset()

    def holding(self, leaves: list[Any]) -> Activation:
        """The same nesting with other leaves."""
        return Activation(leaves, self.spec, self.shared)

    @property
    def differentiable(self) -> list[int]:
        """The places of the leaves that require grad."""
        return [k for k, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]


@dataclass(frozen=True, eq=False)
class Call:
    """The data that all stages share in one call of the model."""

    state: State
    input: Division
    checkpointed: int  # How many microbatches are, from the first one.
    computes: Sequence[Stream]  # On which each stage computes.
    callers: Sequence[Stream]  # The caller's own, on each stage's device.
    seeds: Seeds
    batch: Batch | None  # None if nothing is checkpointed.
    variables: Context  # The caller's.
    contexts: Sequence[Context]  # A copy of these for each microbatch.
    statistics: Statistics | None
    moves: Moves  # Copies of the input and the target to the stages' devices.

    @property
    def leaves(self) -> microbatch.Leaves:
        """The flat input."""
        return self.input.leaves

    @property
    def rows(self) -> microbatch.Rows:
        """The first row and the number of rows of each microbatch."""
        return self.input.rows

    @cached_property
    def beside(self) -> bool:
        """True if stages on one device compute on different streams of it."""
        own = [compute for compute in self.computes if compute is not None]
        return any([
            one.device == other.device and not stream.same(one, other) for k, one in enumerate(own) for other in own[:k]
        ])

    @cached_property
    def shared(self) -> list[Tensor]:
        """Tensors of the input that several microbatches get whole."""
        return [self.leaves[k] for k in self.input.whole]

    def cut(self, division: Division, stage: int) -> list[Activation]:
        """The microbatches of a value that the caller gives to a stage, on that stage's stream."""
        giver, taker = self.callers[stage], self.computes[stage]
        overlapping = division.whole  # All microbatches have the whole tensors.
        activations = []
        for i, (leaves, spec) in enumerate(division.scattered()):
            places = division.having(i)
            shared = sharing([division.leaves[k] for k in places]) | {
                at for at, k in enumerate(places) if k in overlapping
            }
            activations.append(Activation(_handed(leaves, giver, taker), spec, shared))
        return activations

    def cut_detached(self, division: Division, stage: int) -> list[Activation]:
        """The microbatches as from ``cut``, but as leaves, outside the caller's graph."""
        with torch.no_grad():
            activations = self.cut(division, stage)
        for i, activation in enumerate(activations if self.state.grad else ()):
            for part, k in zip(activation.leaves, division.having(i)):
                leaf = division.leaves[k]
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    part.requires_grad_()
        return activations

    def handed_back(self, leaves: list[Any], stage: int = -1) -> list[Any]:
        """A stage's results (by default, the last one's), for the caller's stream."""
        return _handed(leaves, self.computes[stage], self.callers[stage])

    def rejoin(self) -> None:
        """Makes the caller's streams wait for the stages'."""
        if self.batch is not None:
            self.batch.close()
        for compute, caller in zip(self.computes, self.callers):
            if compute is not caller:
                stream.wait(caller, compute)

    def end(self) -> bool:
        """Updates statistics and the random state; returns False if something drew random numbers unwatched."""
        self.moves.settle()
        watched = self.seeds.settle()
        if self.statistics is not None:
            read = self.statistics.commit()
            for compute, caller in zip(self.computes, self.callers):
                stream.wait(compute, caller)
            del read  # If it were freed earlier, a stage's stream could reuse memory that the commit still reads.
        return watched


def begin(
    input: Division,
    uncheckpointed: int | None,
    state: State,
    devices: Sequence[torch.device],
    computes: Sequence[Stream],
    callers: Sequence[Stream],
    collects: bool,
    doubts: Callable[[], None],
    anywhere: bool = False,
) -> Call:
    """A call of the model; the stages' streams wait for the caller's. The last microbatches aren't checkpointed.

    ``uncheckpointed``: how many, or None for all; ``collects``: whether a layer has statistics of the whole batch;
    ``doubts``: see ``Seeds``;
    ``anywhere``: whether parts of the batch may be on the devices of later stages.
    """
    moves = Moves()
    input = moves.input(input, devices if anywhere else devices[:1])
    leaves, rows = input.leaves, input.rows
    for compute, caller in zip(computes, callers):
        if compute is not caller:
            stream.wait(compute, caller)
    checkpointed = 0 if uncheckpointed is None else max(0, len(rows) - uncheckpointed)
    variables, statistics = contextvars.copy_context(), None
    if collects:
        statistics = Statistics()
        statistics.collect(variables)
    contexts = [variables.copy() for _ in rows]
    if statistics is not None:
        contexts = [statistics.collect(context, i) for i, context in enumerate(contexts)]
    return Call(
        state=state,
        input=input,
        checkpointed=checkpointed,
        computes=computes,
        callers=callers,
        seeds=Seeds(len(devices), len(rows), doubts),
        batch=Batch(leaves) if checkpointed else None,
        variables=variables,
        contexts=contexts,
        statistics=statistics,
        moves=moves,
    )


def _handed(leaves: list[Any], giver: Stream, taker: Stream) -> list[Any]:
    if giver is taker or stream.same(giver, taker):
        return leaves
    return [hand_over(leaf, giver, taker) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
