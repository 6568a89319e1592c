"""A worker's mailbox: values that other workers send to it, each under a key, in whatever order they arrive.

The exchange of a scheduled call is its mailboxes, and the routes that take values to the other stage's device.

Guarantee: ``take`` never waits forever. A value is put in by a worker that has not stopped, or ``stop`` is: a worker
that fails stops every mailbox of its call, and if one dies, the caller stops them. What would break it: a worker that
ends without that, since other workers would go on waiting for its values.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any

from splitpipe.core import stream
from splitpipe.core.stream import Stream
from splitpipe.core.transfer import Routes


class Stopped(BaseException):
    """The call was stopped; the reason is raised elsewhere."""


class Mailbox:
    """The values sent to one worker: its thread takes them, any thread may put."""

    def __init__(self) -> None:
        self._arriving: SimpleQueue[tuple[Hashable, Any] | None] = SimpleQueue()
        self._arrived: dict[Hashable, Any] = {}

    def put(self, key: Hashable, value: Any) -> None:
        """Sends a value. A key is used once."""
        self._arriving.put((key, value))

    def keep(self, key: Hashable, value: Any) -> None:
        """Variant of ``put`` for the thread that takes the value out itself."""
        self._arrived[key] = value

    def take(self, key: Hashable) -> Any:
        """Waits for a value, or raises Stopped."""
        while key not in self._arrived:
            message = self._arriving.get()
            if message is None:
                self._arriving.put(None)  # For the next call of take.
                raise Stopped
            other, value = message
            self._arrived[other] = value
        return self._arrived.pop(key)

    def stop(self) -> None:
        """Makes ``take`` raise Stopped, now and later."""
        self._arriving.put(None)


class Exchange:
    """The mailboxes of one scheduled call, and the routes between its stages (None if all are on the CPU)."""

    def __init__(self, workers: Sequence[int], computes: Sequence[Stream], routes: Routes | None) -> None:
        self._workers = workers
        self.side_by_side = max(workers) > 0
        self._computes = computes
        self._routes = routes
        self._mail = [Mailbox() for _ in range(max(workers) + 1)]

    def put_local(self, target: int, key: Hashable, value: Any) -> None:
        """Puts in a value that is on the target's stream already. Called before the workers start."""
        self._mail[self._workers[target]].keep(key, (value, None))

    def send(
        self,
        source: int,
        target: int,
        key: Hashable,
        leaves: Sequence[Any],
        make: Callable[..., Any],
        timed: Callable[[Stream, bool], None] | None = None,
    ) -> None:
        """Sends the value that ``make`` makes of the leaves, when they have arrived. Called by the source's worker."""
        route = None if self._routes is None else self._routes.of(source, target)
        event = None
        if route is not None:
            leaves, event = route.carry(leaves, timed)
        mail = self._mail[self._workers[target]]
        deliver = mail.keep if self._workers[source] == self._workers[target] else mail.put
        deliver(key, (make(leaves), event))

    def receive(self, target: int, key: Hashable) -> Any:
        """Waits for a value, and has the stage's stream wait for its tensors. Called by the target's worker."""
        value, event = self._mail[self._workers[target]].take(key)
        if event is not None:
            stream.wait_for(self._computes[target], event)
            stream.spent(event)
        return value

    def stop(self) -> None:
        """Stops every mailbox."""
        for mail in self._mail:
            mail.stop()
