"""The resources that a model has only in its own process: threads, streams, and facts about its stages.

A copy of a model doesn't have them; each is created when it is first needed.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

from splitpipe.core import stream
from splitpipe.core.rng import RngMode
from splitpipe.core.stream import NamedStreams, Place, Stream
from splitpipe.core.transfer import Routes
from splitpipe.core.worker import Pool
from splitpipe.partition import placing
from splitpipe.stage.layers import ModelLayers, StageCache, StageFacts


class Resources:
    """The threads, streams and caches of one model, whose stages are in ``rows`` of a schedule."""

    def __init__(self, places: Sequence[Place], rows: Sequence[int]) -> None:
        self.places = places
        self.devices = [place.device for place in places]
        self.on_cpu = all(device.type == "cpu" for device in self.devices)
        self.caches = [StageCache() for _ in places]
        self.block_caches: weakref.WeakSet[StageCache] = weakref.WeakSet()  #: Of separately recomputed blocks.
        self.workers: list[int] = []  # The worker of each stage.
        self._rows = rows
        self._pool: Pool | None = None
        self._pooled: list[int] = []  # The worker of each stage when the threads were started.
        self._code: list[Any] = []  # The modules and forwards that the caches' facts are about.
        self._placed: weakref.ref[ModelLayers] | None = None  # The layers for which the workers were chosen.
        self._routes: Routes | None = None
        self._doubting = False
        self.named = NamedStreams()

    def find_workers(self, layers: ModelLayers) -> None:
        """Chooses the worker of each stage, and forgets what other modules' runs have shown."""
        # A model may be sharded, or a layer compiled or put into two stages, after its first forward.
        if self._placed is None or self._placed() is not layers:
            code = layers.structure.code()
            if len(code) != len(self._code) or not all(map(is_, code, self._code)):
                for cache in (*self.caches, *self.block_caches):
                    cache.facts.clear()
                self._code = code
            parts = layers.parts()
            placing.verify_graphs(parts, self.places)
            self.workers = placing.workers(parts, self.places, self._rows)
            self._placed = weakref.ref(layers)

    def pool(self, layers: ModelLayers, threads: int | None = None) -> Pool:
        """The threads, in working order: one per worker, or at least ``threads`` that run ops of any stage."""
        self.find_workers(layers)
        homes = dict(zip(reversed(self.workers), reversed(self.places)))  # The place of each worker's first stage.
        size = max(self.workers) + 1 if threads is None else threads
        pool = self._pool
        if pool is None or not pool.usable or pool.size < size or threads is None and self._pooled != self.workers:
            self._pool, self._pooled = None, self.workers  # In this order, since an interrupt may come in between.
            pool = Pool([f"splitpipe worker {number}" for number in range(size)])
            devices = [homes[number if threads is None else 0].device for number in range(size)]
            pool.run([(number, partial(stream.bind, device)) for number, device in enumerate(devices)])
            self._pool = pool
        computing = sorted({worker for worker, device in zip(self.workers, self.devices) if device.type == "cpu"})
        if computing:
            pool.share_threads(computing if threads is None else list(range(pool.size)), among=len(computing))
        return pool

    def at_work_here(self) -> bool:
        """True in the model's own worker threads, where waiting for a call of the model would be a deadlock."""
        return self._pool is not None and self._pool.has_this_thread()

    def verify_groups(self, layers: ModelLayers) -> None:
        """Raises for process groups that autograd's threads, one per device, would share."""
        if len(set(self.devices)) > 1:
            placing.verify_groups(layers.parts(), self.places)

    def streams(self, layers: ModelLayers) -> tuple[list[Stream], list[Stream]]:
        """The stream on which each stage computes, and the caller's current one on its device."""
        if self.on_cpu:
            return [None] * len(self.places), [None] * len(self.places)
        callers = [stream.current(device) for device in self.devices]
        computes = [caller if place.stream is None else place.stream for place, caller in zip(self.places, callers)]
        placing.verify_streams((layer for part in layers.parts() for layer in part), [*computes, *callers])
        return computes, callers

    def routes(self, computes: Sequence[Stream]) -> Routes | None:
        """The routes between stages that compute on these streams; None if all are on the CPU."""
        found = self._routes
        if not self.on_cpu and (found is None or not all(map(stream.same, found.computes, computes))):
            self._routes = found = Routes(self.devices, computes, self.named)
        return found

    def doubt(self) -> None:
        """Any stage may have begun to draw random numbers: the next call watches all of them."""
        self._doubting = True
        for facts in self._facts():
            if facts.rng is not RngMode.EXCLUSIVE:
                facts.rng, facts.generators = RngMode.DOUBTED, None

    def settle_rng_modes(self, watched: bool) -> None:
        """At the end of a call: if something drew unwatched, any stage may have done it."""
        if not watched:
            self.doubt()
        elif self._doubting:
            self._doubting = False
            for facts in self._facts():
                if facts.rng is RngMode.DOUBTED:  # If it has run, it drew nothing.
                    facts.rng = RngMode.UNKNOWN if facts.generators is None else RngMode.NONE

    def _facts(self) -> list[StageFacts]:
        return [facts for cache in (*self.caches, *self.block_caches) for facts in cache.facts.values()]
