"""The threads and streams of a model, which it has only in its own process: each is created when it is first needed."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from splitpipe.core import stream
from splitpipe.core.stream import Place, Stream
from splitpipe.core.transfer import Route
from splitpipe.core.worker import Pool


class Resources:
    """The threads and streams of one model."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.devices = [place.device for place in places]
        self.on_cpu = all(device.type == "cpu" for device in self.devices)
        self._pool: Pool | None = None
        self.named = cache(stream.new)

    def pool(self, workers: Sequence[int], waiting: int = 0) -> Pool:
        """The threads, in working order: one for each worker of a stage, and one for each forward that waits there."""
        size, pool = max(workers) + 1 + waiting, self._pool
        if pool is None or not pool.usable or pool.size < size:
            self._pool = None  # First, since an interrupt may come in between.
            pool = Pool([f"splitpipe worker {number}" for number in range(size)])
            homes = dict(zip(reversed(workers), reversed(self.devices)))  # The device of each worker's first stage.
            binds = [partial(stream.bind, homes.get(number, self.devices[0])) for number in range(size)]
            pool.run([*enumerate(binds)])
            self._pool = pool
        computing = {worker for worker, device in zip(workers, self.devices) if device.type == "cpu"}
        if computing:
            pool.share_threads(len(computing))
        return pool

    def refuse_own_threads(self) -> None:
        """Raises in the model's own worker threads, where waiting for a call of the model would be a deadlock."""
        if self._pool is not None and self._pool.has_this_thread():
            raise RuntimeError(
                "a SplitPipe was called by one of its layers, inside its own forward, and would wait for itself. "
                "(A checkpoint around a model whose layers differentiate in their forward does so: expected the "
                "model's own checkpoint='always'.)"
            )

    def routes(self, computes: Sequence[Stream]) -> Callable[[int, int], Route | None]:
        """The routes between stages that compute on these streams."""
        between = partial(Route.between, self.devices, computes, self.named)
        return (lambda source, target: None) if self.on_cpu else cache(between)
