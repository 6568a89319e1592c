"""The post between stages: a value is carried to the other stage's device, and put into its worker's mailbox."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from splitpipe.core import stream
from splitpipe.core.mailbox import Mailbox
from splitpipe.core.stream import Stream
from splitpipe.core.transfer import Port, Route


class Post:
    """The mail of one pass.

    Args:
        workers: the worker of each stage.
        devices: of each stage.
        streams: that each stage computes on.
        copying: a stream of a device for some use, the same one every time.

    Attributes:
        side_by_side: whether there are several workers.
    """

    def __init__(
        self,
        workers: Sequence[int],
        devices: Sequence[torch.device],
        streams: Sequence[Stream],
        copying: Callable[[torch.device, str], Stream],
    ) -> None:
        self._workers = workers
        self.side_by_side = max(workers) > 0
        self._devices = devices
        self._streams = streams
        self._copying = copying
        self._routes: dict[tuple[int, int], Route | None] = {}
        self._mail = [Mailbox() for _ in range(max(workers) + 1)]

    def bring(self, target: int, key: Hashable, value: Any) -> None:
        """Puts in what is on the target's stream already. Called before the workers start."""
        self._mail[self._workers[target]].put(key, (value, None))

    def send(
        self,
        source: int,
        target: int,
        key: Hashable,
        leaves: Sequence[Any],
        make: Callable[..., Any],
        timed: Callable[[Stream, bool], None] | None = None,
    ) -> None:
        """Sends a value from one stage to another. Called by the source's worker.

        Args:
            source: stage that has it.
            target: stage that takes it.
            key: to take it by.
            leaves: its tensors and other values.
            make: makes the value of the leaves, once they are there.
            timed: see ``Route.carry``.
        """
        route = self._route(source, target)
        event = None
        if route is not None:
            leaves, event = route.carry(leaves, timed)
        mail = self._mail[self._workers[target]]
        deliver = mail.keep if self._workers[source] == self._workers[target] else mail.put
        deliver(key, (make(leaves), event))

    def take(self, target: int, key: Hashable) -> Any:
        """Waits for a value, and has the stage's stream wait for its tensors. Called by the target's worker.

        Raises:
            Stopped: the pass was stopped.
        """
        value, event = self._mail[self._workers[target]].take(key)
        stream.wait_for(self._streams[target], event)
        stream.spent(event)
        return value

    def stop(self) -> None:
        """Stops every mailbox."""
        for mail in self._mail:
            mail.stop()

    def _route(self, source: int, target: int) -> Route | None:
        if (source, target) not in self._routes:
            here, there = self._port(source, "out"), self._port(target, f"in from {source}")
            near = here.device == there.device and stream.same(here.compute, there.compute)
            self._routes[source, target] = None if near else Route(here, there)
        return self._routes[source, target]

    def _port(self, stage: int, use: str) -> Port:
        # One stream a link: on a common one, a copy would wait for those that other stages are not ready for.
        device = self._devices[stage]
        return Port(device, self._streams[stage], self._copying(device, use))
