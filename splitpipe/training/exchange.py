"""The exchange of values between stages: each is carried to the other's device, and put into its worker's mailbox."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from splitpipe.core import stream
from splitpipe.core.mailbox import Mailbox
from splitpipe.core.stream import Stream
from splitpipe.core.transfer import Routes


class Exchange:
    """The mailboxes of one call.

    Args:
        workers: the worker of each stage.
        computes: the stream that each stage computes on.
        routes: between the stages; None if all are on the CPU.

    Attributes:
        side_by_side: whether there are several workers.
    """

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
        """Sends a value from one stage to another. Called by the source's worker.

        Args:
            source: stage that has it.
            target: stage that takes it.
            key: to take it by.
            leaves: its tensors and other values.
            make: makes the value of the leaves, once they are there.
            timed: see ``Route.carry``.
        """
        route, event = None if self._routes is None else self._routes.of(source, target), None
        if route is not None:
            leaves, event = route.carry(leaves, timed)
        mail = self._mail[self._workers[target]]
        deliver = mail.keep if self._workers[source] == self._workers[target] else mail.put
        deliver(key, (make(leaves), event))

    def receive(self, target: int, key: Hashable) -> Any:
        """Waits for a value, and has the stage's stream wait for its tensors. Called by the target's worker.

        Raises:
            Stopped: the call was stopped.
        """
        value, event = self._mail[self._workers[target]].take(key)
        if event is not None:
            stream.wait_for(self._computes[target], event)
            stream.spent(event)
        return value

    def stop(self) -> None:
        """Stops every mailbox."""
        for mail in self._mail:
            mail.stop()
