"""The resources that a model has in its own process alone: threads, streams, and facts about its stages.

No copy of a model takes them along, and nobody misses them, since each is made when it is first needed.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from splitpipe.core import stream
from splitpipe.core.rng import RngMode
from splitpipe.core.stream import NamedStreams, Place, Stream
from splitpipe.core.transfer import Routes
from splitpipe.core.worker import Pool
from splitpipe.deferral.pending import PendingStore
from splitpipe.stage import cut
from splitpipe.stage.call import Call
from splitpipe.stage.facts import StageCache
from splitpipe.stage.layers import ModelLayers, Named
from splitpipe.stage.parallel import verify_streams
from splitpipe.stage.stage import Stage


class Resources:
    """The threads, streams and memories of one model.

    Args:
        places: of the stages.
        spans: first layer of each stage, and the one after its last.
        rows: the row of the schedule that each stage is in.

    Attributes:
        on_cpu: whether all stages are on the CPU.
        devices: of the stages.
        workers: the worker of each stage.
        named: further streams of their devices.
    """

    def __init__(self, places: Sequence[Place], spans: Sequence[tuple[int, int]], rows: Sequence[int]) -> None:
        self.places = places
        self.devices = [place.device for place in places]
        self.on_cpu = all(device.type == "cpu" for device in self.devices)
        self.memories = [StageCache() for _ in places]
        self.workers: list[int] = []
        self._spans = spans
        self._rows = rows
        self._layers: ModelLayers | None = None
        self._pool: Pool | None = None
        self._computing: list[int] = []
        self._routes: Routes | None = None
        self.named = NamedStreams()

    def layers(self, layers: Sequence[Named]) -> ModelLayers:
        """The layers by stage, as they are now."""
        found = self._layers
        if found is None or not found.still(layers):
            found = self._layers = ModelLayers(layers, self._spans, self.places)
        return found

    def pool(self, layers: ModelLayers) -> Pool:
        """The threads, in working order."""
        pool = self._pool
        # A model may be sharded after its first forward.
        if pool is None or not pool.usable or (max(self.workers) and layers.sharded):
            parts = [[layer for _, layer in stage.layers] for stage in layers.stages]
            cut.verify_graphs(parts, self.places)  # A layer may be compiled after it was wrapped.
            self.workers = cut.workers(parts, self.places, self._rows)
            pool = Pool([f"splitpipe worker {number}" for number in range(max(self.workers) + 1)])
            homes = dict(zip(reversed(self.workers), reversed(self.places)))  # Of each worker its first stage's.
            pool.run([(worker, partial(stream.bind, home.device)) for worker, home in homes.items()])
            self._pool = pool
            self._computing = sorted({
                worker for worker, device in zip(self.workers, self.devices) if device.type == "cpu"
            })
        pool.share_threads(self._computing)
        return pool

    def verify_groups(self, layers: ModelLayers) -> None:
        """Refuses process groups that autograd's threads would share: see ``cut.verify_groups``."""
        if len(set(self.devices)) > 1:
            cut.verify_groups([[layer for _, layer in stage.layers] for stage in layers.stages], self.places)

    def streams(self, layers: ModelLayers) -> tuple[list[Stream], list[Stream]]:
        """The stream that each stage computes on, and the caller's own on its device, now."""
        if self.on_cpu:
            return [None] * len(self.places), [None] * len(self.places)
        callers = [stream.current(device) for device in self.devices]
        computes = [caller if place.stream is None else place.stream for place, caller in zip(self.places, callers)]
        verify_streams((layer for stage in layers.stages for _, layer in stage.layers), [*computes, *callers])
        return computes, callers

    def routes(self, computes: Sequence[Stream]) -> Routes | None:
        """The routes between stages that compute on these streams; None if all are on the CPU."""
        if not self.on_cpu and (self._routes is None or not self._routes.between_streams(computes)):
            self._routes = Routes(self.devices, computes, self.named)
        return self._routes

    def stage(self, layers: ModelLayers, index: int, call: Call, deposit: PendingStore | None) -> Stage:
        """A stage, for one call.

        Args:
            layers: of the model.
            index: of the stage.
            call: of the model.
            deposit: where its weight gradients wait; None leaves them to autograd.
        """
        return Stage(layers.stages[index], self.memories[index], call.computes[index], call.stop > 0, deposit)

    def forget_rng_modes(self) -> None:
        """Something drew random numbers that was not known to: each stage has to show again whether it does."""
        for memory in self.memories:
            for known in memory.known.values():
                if known.rng is RngMode.NONE:
                    known.rng, known.generators = RngMode.UNKNOWN, None
