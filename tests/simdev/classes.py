"""Streams and events of torch.sim, which stand to torch.Stream and torch.Event as those of torch.cuda do.

A stream is equal to those of its own class alone. An event has its record beside the one of the class it comes from:
``torch.Stream.wait_event`` looks at that one, finds it never recorded, and returns.
"""
from __future__ import annotations

import ctypes
from time import perf_counter
from typing import Any

import torch


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, *(() if device is None else (device,)), priority=priority, **kwargs)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and bool(super().__eq__(other))

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))


class Event(torch.Event):
    """As torch.cuda.Event."""

    _library: ctypes.CDLL
    _number = 0
    _at = 0.0
    _index: int | None = None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, "sim", enable_timing=enable_timing)

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        return None if self._index is None else torch.device("sim", self._index)

    def record(self, stream: Any = None) -> None:
        stream = _own(stream)
        if self._index not in (None, stream.device_index):
            raise RuntimeError(f"Event device {self._index} does not match recording stream's {stream.device_index}")
        self._index = stream.device_index
        self._at = perf_counter()  # Work is done when it is launched.
        self._number = self._library.sim_record(stream.device_index, stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        stream = _own(stream)
        if self._number:
            self._library.sim_wait(stream.device_index, stream.stream_id, ctypes.c_uint64(self._number))

    def synchronize(self) -> None:
        if self._number:
            self._library.sim_synchronize(ctypes.c_uint64(self._number))

    def elapsed_time(self, end_event: Any) -> float:
        return 1e3 * float(end_event._at - self._at)

    def query(self) -> bool:
        return True


def current_stream(device: Any = None) -> Stream:
    """As torch.cuda.current_stream."""
    now = torch.accelerator.current_stream(device)
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


def _own(stream: Any) -> Stream:
    found = current_stream() if stream is None else stream
    if not isinstance(found, Stream):  # torch.cuda's reads what no torch.Stream has.
        raise TypeError(f"an event of torch.sim got a {type(found)}: expected a torch.sim.Stream")
    return found


def install(module: Any, library: ctypes.CDLL) -> None:
    """Has the module offer them."""
    library.sim_record.restype = ctypes.c_uint64
    Event._library = library
    module.Stream, module.Event, module.current_stream = Stream, Event, current_stream
