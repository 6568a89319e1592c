"""What a call has in all stages: its microbatches, and the caller's state and streams.

    scatter    cut the values into microbatches, and make the stages' streams wait for the caller's; the stages run
    rejoin     make the caller's streams wait for the stages'; the output or the loss is put together
    end        note whether the CPU's generator has moved, and update the statistics of deferred BatchNorm
"""
from __future__ import annotations

import contextvars
from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, default_generator

from splitpipe.batchnorm import ChannelStatistics, collecting, update
from splitpipe.core import stream
from splitpipe.core.stream import Place, Stream
from splitpipe.core.tensors import sharing
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.microbatch.division import Division, move
from splitpipe.microbatch.tree import Nesting
from splitpipe.skip.tracker import Key

#: Where the gradient of a value that entered must go: a stage, and the number of a root there; or the caller's input
#: (None) or target (its key), and the place of a leaf.
Origin = tuple[int | Key | None, int]


@dataclass
class Activation:
    """A value on its way between stages: its leaves, their nesting and origins, which are None without a gradient.

    ``shared``: the leaves that share memory with others on their way; ``event``: after which they are there.
    """

    leaves: list[Any]
    nesting: Nesting
    origins: list[Origin | None] = field(default_factory=list)
    shared: frozenset[int] = frozenset()
    event: torch.Event | None = None


class Call:
    """What all stages share in one call; ``own_forward``: with cuts, when tensors may stay on later devices.

    ``draw``: whether calls of a kind draw from the CPU's default generator, as earlier ones have shown. If this one may
    (``watched``), or is the ``first`` of its kind, its ops run one after another. If a model begins to draw later, the
    end of that call notices it.
    """

    def __init__(
        self, input: Division, places: Sequence[Place], state: State, checkpointed: int, own_forward: bool,
        draw: dict[Any, bool], kind: Any,
    ) -> None:
        self._draw, self._kind, self._generator = draw, kind, _position()
        self.first, self.watched = kind not in draw, draw.get(kind, True)
        devices = [place.device for place in places]
        self.unread: list[torch.Event] = []  #: After which pinned memory of the input and the target has been read.
        self.input = move(input, devices if own_forward else devices[:1], self.unread)
        self.leaves, self.microbatches, self.state = self.input.leaves, len(self.input.rows), state
        #: The caller's current streams on the devices of the stages, and the streams on which these compute.
        self.callers = [stream.current(device) for device in devices]
        self.computes = [place.stream or caller for place, caller in zip(places, self.callers)]
        #: How many microbatches are checkpointed, from the first one; and of these, R's: with cuts, B recomputes.
        self.checkpointed, self.recomputed = checkpointed, 0 if own_forward else checkpointed
        #: What deferred BatchNorm layers collect; in a call inside another one, for that one, as a single microbatch.
        self.statistics: list[ChannelStatistics] = []
        outer = collecting.get()
        collected = self.statistics if outer is None else outer[0]
        #: The caller's context variables, and a copy of them for each microbatch.
        self.variables = contextvars.copy_context()
        self.variables.run(collecting.set, (collected, None))
        self.contexts = [self.variables.copy() for _ in range(self.microbatches)]
        for i, context in enumerate(self.contexts if outer is None else ()):
            context.run(collecting.set, (collected, i))

    def scatter(self, value: Division, key: Key | None = None, detached: bool = False) -> list[Activation]:
        """The microbatches of a value; ``detached``: as leaves with origins, outside the caller's graph."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            parts = value.scatter()
        activations, tracked = [], detached and self.state.grad
        for places, (leaves, nesting) in zip(value.places, parts):
            given = [value.leaves[k] for k in places]
            shared = {at for at, k in enumerate(places) if k in value.shared_places}  # All microbatches have these.
            if len(given) > 1:
                shared |= sharing(given)
            for caller, compute in zip(self.callers, self.computes):
                hand(leaves, caller, compute)
            needs = [tracked and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given]
            origins: list[Origin | None] = [(key, k) if each else None for k, each in zip(places, needs)]
            activations.append(Activation(leaves, nesting, origins, frozenset(shared)))
        return activations

    def rejoin(self) -> None:
        """Makes the caller's streams wait for the stages'."""
        for compute, caller in zip(self.computes, self.callers):
            stream.wait(caller, compute)

    @property
    def drew(self) -> bool:
        """Whether something has drawn from the CPU's generator since the call began."""
        return _position() != self._generator

    def end(self) -> None:
        """Notes whether the call drew, updates statistics, and waits until pinned memory has been read."""
        drew = self.drew
        # A layer may draw in some steps only: a model that has drawn is watched from then on.
        self._draw[self._kind] = self._draw.get(self._kind, False) or drew
        if drew and not self.watched and self.checkpointed:
            raise RuntimeError(
                "something drew random numbers from the default generator unwatched: a layer that hadn't drawn "
                "before, or another thread. Its recomputation would draw others. Repeat the step, which will take "
                "new layers into account; give a thread a separate torch.Generator."
            )
        for event in self.unread:
            event.synchronize()
        if self.statistics:
            update(self.statistics)
            for compute, caller in zip(self.computes, self.callers):
                stream.wait(compute, caller)
            self.statistics.clear()  # Not earlier: a stage's stream could reuse memory that the update still reads.


def hand(leaves: list[Any], giver: Stream, taker: Stream) -> list[Any]:
    """The leaves for a stream, which waits for another one, on which they were computed."""
    if giver != taker:
        stream.wait(taker, giver)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                stream.hold(leaf, taker)
    return leaves


def _position() -> bytes:
    with DisableTorchFunction():  # And not with torch's ops, which dispatch modes would see, and which release the GIL.
        state = default_generator.get_state()
        return string_at(state.data_ptr(), state.nbytes)
