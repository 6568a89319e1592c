"""What surrounds one pass of a batch, scheduled or not: its microbatches, the caller's state and streams, its seeds.

    begin     cut the batch, have the stages' streams wait for the caller's
    ...       the pass
    rejoin    have the caller's streams wait for the stages'
    ...       what becomes of its outcome
    end       update the statistics of deferred BatchNorm and the random state: nothing can fail any more
"""
from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from splitpipe.batchnorm import Statistics
from splitpipe.core import microbatch, stream
from splitpipe.core.rng import Seeds
from splitpipe.core.stream import Place
from splitpipe.core.tensors import sharing
from splitpipe.core.thread_state import State
from splitpipe.core.transfer import hand_over
from splitpipe.stage.batched import spread
from splitpipe.stage.checkpoint import Batch
from splitpipe.stage.stage import Parcel


class Setting:
    """One pass's surroundings.

    Args:
        input: the batch.
        chunks: number of microbatches, at most.
        spared: how many of the last microbatches are not checkpointed; None spares all.
        places: of the stages.
        state: the caller's thread-local state.
        batched: what of the input is cut, as of ``batched.spread``; None: all of it.

    Attributes:
        leaves: of the batch.
        whole: places of those that are tensors and go whole into every microbatch.
        rows: first row and number of rows of each microbatch.
        stop: the first microbatch that is not checkpointed.
        variables: the caller's context variables.

    Raises:
        TypeError: the batch can't be cut.
        ValueError: its tensors disagree in size, or are on another device than the first stage.
    """

    def __init__(
        self, input: Any, chunks: int, spared: int | None, places: Sequence[Place], state: State, batched: Any = None
    ) -> None:
        self.leaves, self._spec = microbatch.flatten(input, "the input", batch=True)
        flags = () if batched is None else spread(batched, input)
        self.whole = frozenset(
            k for k, (leaf, cut) in enumerate(zip(self.leaves, flags))
            if isinstance(leaf, Tensor) and leaf.dim() and not cut
        )
        self.rows = microbatch.cuts(microbatch.batch_size(self.leaves, whole=self.whole), chunks)
        verify_device(self.leaves, places[0].device)
        self.stop = 0 if spared is None else max(0, len(self.rows) - spared)
        self.state = state
        self.seeds = Seeds(len(places), len(self.rows))
        self.batch = Batch(self.leaves)
        self._statistics = Statistics()
        self.variables = self._statistics.collect(contextvars.copy_context())
        self._callers = [stream.current(place.device) for place in places]

    def begin(self, computes: Sequence[stream.Stream]) -> list[Parcel]:
        """Hands over to the stages' streams; gives the microbatches.

        Args:
            computes: the stream that each stage computes on.
        """
        self._computes = computes
        for compute, caller in zip(computes, self._callers):
            stream.wait(compute, caller)
        return self.cut(self.leaves, self._spec, 0, self.whole)

    def begin_apart(self, computes: Sequence[stream.Stream]) -> list[Parcel]:
        """As ``begin``; the microbatches are leaves, outside of the caller's graph."""
        with torch.no_grad():
            return _leaves(self.begin(computes), self.leaves, self.state.grad)

    def cut_apart(self, leaves: Sequence[Any], spec: TreeSpec, stage: int) -> list[Parcel]:
        """As ``cut``; the microbatches are leaves, outside of the caller's graph."""
        with torch.no_grad():
            return _leaves(self.cut(leaves, spec, stage), leaves, self.state.grad)

    def cut(
        self, leaves: Sequence[Any], spec: TreeSpec, stage: int, whole: frozenset[int] = frozenset()
    ) -> list[Parcel]:
        """The microbatches of something that the caller gives to a stage, as of ``begin``."""
        overlapping = sharing(leaves) | whole  # What is whole, the other microbatches have, too.
        giver, taker = self._callers[stage], self._computes[stage]
        return [
            Parcel(_handed(part, giver, taker), spec, overlapping)
            for part in microbatch.scatter(list(leaves), self.rows, whole)
        ]

    def rejoin(self) -> None:
        """Hands back to the caller's streams."""
        self.batch.close()
        for compute, caller in zip(self._computes, self._callers):
            stream.wait(caller, compute)

    def end(self) -> bool:
        """Keeps what the pass leaves behind; False if something drew random numbers that nobody watched."""
        watched = self.seeds.settle()
        read = self._statistics.commit()
        for compute, caller in zip(self._computes, self._callers):
            stream.wait(compute, caller)
        del read  # Freed any sooner, its memory could be reused by a stage's stream that the commit still reads.
        return watched

    def handed_back(self, leaves: list[Any], stage: int = -1) -> list[Any]:
        """What a stage has made, the last one if none is named, for the caller."""
        return _handed(leaves, self._computes[stage], self._callers[stage])


def _leaves(parcels: list[Parcel], of: Sequence[Any], grad: bool) -> list[Parcel]:
    for number, whole in enumerate(of):
        if grad and isinstance(whole, Tensor) and whole.requires_grad:
            for parcel in parcels:
                parcel.leaves[number].requires_grad_()
    return parcels


def _handed(leaves: list[Any], giver: stream.Stream, taker: stream.Stream) -> list[Any]:
    if stream.same(giver, taker):
        return leaves
    return [hand_over(leaf, giver, taker) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def verify_device(leaves: microbatch.Leaves, there: torch.device) -> None:
    """Refuses a batch that is not on the first stage's device."""
    found = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    # A tensor on the CPU may be meant to be there (lengths of sequences); all of them can't.
    wrong = found - {there, torch.device("cpu")}
    if wrong or there not in found:
        names = ", ".join(sorted(str(device) for device in wrong or found))
        raise ValueError(
            f"the input is on {names}, but the first stage is on {there}: expected it there. Move it first, with "
            "input.to(model.devices[0])."
        )
