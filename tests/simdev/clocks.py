"""Vector clocks of a log: what is done before what, by events and by a host that waits, however the run goes."""
from __future__ import annotations

from . import Launch

#: Device and number.
Stream = tuple[int, int]
#: Of each stream, how many of its launches are done.
Clock = dict[Stream, int]


class Clocks:
    """The state behind one launch of the log.

    Attributes:
        host: what the host knows to be done.
    """

    def __init__(self) -> None:
        self.host: Clock = {}
        self._clocks: dict[Stream, Clock] = {}
        self._events: dict[int, Clock] = {}

    def take(self, launch: Launch) -> None:
        """A record, a wait, or a host that waits; nothing else orders anything."""
        stream = launch.device, launch.stream
        if launch.kind == "record":
            self.tick(stream)
            self._events[launch.event] = dict(self.of(stream))
        elif launch.kind == "wait":
            _join(self.of(stream), self._events.get(launch.event, {}))
        elif launch.kind == "sync":
            _join(self.host, self.of(stream))
        elif launch.kind == "sync device":
            for other, clock in self._clocks.items():
                if other[0] == launch.device:
                    _join(self.host, clock)
        elif launch.kind == "sync event":
            _join(self.host, self._events.get(launch.event, {}))

    def of(self, stream: Stream) -> Clock:
        """What is done before the stream's next launch."""
        return self._clocks.setdefault(stream, {})

    def tick(self, stream: Stream) -> int:
        """One more launch of the stream: its number."""
        clock = self.of(stream)
        _join(clock, self.host)  # What the host has waited for is done before anything it launches now.
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
