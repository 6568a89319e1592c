"""What a model has in its own process alone: threads, streams, and what its stages have learnt.

No copy of a model takes them along, and nobody misses them, since each is made when it is first needed.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from splitpipe.core import stream
from splitpipe.core.dtensor import sharded
from splitpipe.core.rng import RngMode
from splitpipe.core.stream import Place
from splitpipe.core.worker import Pool
from splitpipe.deferral.pending import Deposit
from splitpipe.stage import cut
from splitpipe.stage.facts import StageCache
from splitpipe.stage.parallel import verify_streams
from splitpipe.stage.stage import Stage

Named = tuple[str, nn.Module]


class Resources:
    """The threads, streams and memories of one model.

    Args:
        places: of the stages.
        spans: first layer of each stage, and the one after its last.
        rows: the row of the schedule that each stage is in.
    """

    def __init__(self, places: Sequence[Place], spans: Sequence[tuple[int, int]], rows: Sequence[int]) -> None:
        self.places = places
        self._spans = spans
        self._rows = rows
        self._pool: Pool | None = None
        #: The worker of each stage.
        self.workers: list[int] = []
        self.memories = [StageCache() for _ in places]
        self._streams: dict[tuple[torch.device, str], stream.Stream] = {}

    def cut(self, layers: Sequence[Named]) -> list[Sequence[Named]]:
        """The layers of each stage."""
        return [layers[start:end] for start, end in self._spans]

    def pool(self, layers: Sequence[Named]) -> Pool:
        """The threads, in working order."""
        callers = [stream.current(place.device) for place in self.places]
        verify_streams((layer for _, layer in layers), [*self.computes(), *callers])
        pool = self._pool
        stages = [[layer for _, layer in part] for part in self.cut(layers)]
        # A model may be sharded after its first forward.
        if pool is None or not pool.usable or (max(self.workers) and sharded(layer for _, layer in layers)):
            cut.verify_graphs(stages, self.places)  # A layer may be compiled after it was wrapped.
            self.workers = cut.workers(stages, self.places, self._rows)
            pool = Pool([f"splitpipe worker {number}" for number in range(max(self.workers) + 1)])
            homes = dict(zip(reversed(self.workers), reversed(self.places)))  # Of each worker its first stage's.
            pool.run([(worker, partial(stream.bind, home.device)) for worker, home in homes.items()])
            self._pool = pool
        on_cpu = {worker for worker, place in zip(self.workers, self.places) if place.device.type == "cpu"}
        pool.share_threads(sorted(on_cpu))
        return pool

    def verify_groups(self, layers: Sequence[Named]) -> None:
        """Refuses process groups that autograd's threads would share: see ``partition.verify_groups``."""
        if len({place.device for place in self.places}) > 1:
            cut.verify_groups([[layer for _, layer in part] for part in self.cut(layers)], self.places)

    def computes(self) -> list[stream.Stream]:
        """The stream that each stage computes on."""
        return [stream.current(place.device) if place.stream is None else place.stream for place in self.places]

    def stages(
        self,
        layers: Sequence[Sequence[Named]],
        computes: Sequence[stream.Stream],
        deposits: Sequence[Deposit | None],
        checkpointing: bool,
    ) -> list[Stage]:
        """The stages for one pass.

        Args:
            layers: of each stage.
            computes: the stream of each.
            deposits: where the weight gradients of each wait.
            checkpointing: whether any microbatch is checkpointed.
        """
        return [
            Stage(
                index=index,
                place=self.places[index],
                layers=layers[index],
                cache=self.memories[index],
                compute=computes[index],
                checkpointing=checkpointing,
                deposit=deposits[index],
            )
            for index in range(len(self.places))
        ]

    def stream(self, device: torch.device, use: str) -> stream.Stream:
        """A stream of the device for some use, the same one every time.

        What is copied is waited for, and the kernels beside it are small: they go first. Weight gradients give way to
        stages that compute on streams of a higher priority; the default stream has the least, as they do.
        """
        if (device, use) not in self._streams:
            self._streams[device, use] = stream.new(device, 0 if use == "weights" else -1)
        return self._streams[device, use]

    def forget_rng_modes(self) -> None:
        """Something drew random numbers that was not known to: each stage has to show again whether it does."""
        for memory in self.memories:
            for known in memory.known.values():
                if known.rng is RngMode.NONE:
                    known.rng, known.generators = RngMode.UNKNOWN, None
