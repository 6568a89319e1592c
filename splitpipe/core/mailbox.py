"""A worker's mailbox: values that other workers send to it, each under a key, in whatever order they arrive.

Guarantee: ``take`` never waits forever. A value is put in by a worker that has not stopped, or ``stop`` is: a worker
that fails stops every mailbox of its call, and where one dies, the caller does. What would break it: a worker that ends
without that, since those who wait for its values would go on waiting.
"""
from __future__ import annotations

from collections.abc import Hashable
from queue import SimpleQueue
from typing import Any


class Stopped(BaseException):
    """The call was stopped; what has happened is known elsewhere."""


class Mailbox:
    """To be emptied by one thread; any may put in."""

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
                self._arriving.put(None)  # For whoever asks once more.
                raise Stopped
            other, value = message
            self._arrived[other] = value
        return self._arrived.pop(key)

    def stop(self) -> None:
        """Lets whoever waits, now or later, wait no longer."""
        self._arriving.put(None)
