"""A device's stream, or None for the CPU, behind one set of verbs.

Work on the CPU is done when the call returns, so every verb is a no-op there.
"""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Stream = torch.Stream | None

_NOTHING = nullcontext()


def current(device: torch.device) -> Stream:
    """The stream on which this thread queues work for ``device``."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def new(device: torch.device) -> Stream:
    """A further stream of ``device``, for copies that overlap with computing."""
    return None if device.type == "cpu" else torch.Stream(device=device)


def wait(stream: Stream, other: Stream) -> None:
    """What ``stream`` is given from now on starts after everything that ``other`` has been given so far."""
    if stream is not None and other is not None and stream != other:
        stream.wait_stream(other)


def mark(stream: Stream) -> torch.Event | None:
    """What ``stream`` has been given so far, to be waited for."""
    return None if stream is None else stream.record_event()


def wait_for(stream: Stream, event: torch.Event | None) -> None:
    """What ``stream`` is given from now on starts after the event."""
    if stream is not None and event is not None:
        stream.wait_event(event)


def hold(tensor: Tensor, stream: Stream) -> None:
    """Keeps the memory of ``tensor``, freed meanwhile, from being reused before ``stream`` has read it."""
    if stream is not None and tensor.device == stream.device:
        tensor.record_stream(stream)


def use(*streams: Stream) -> AbstractContextManager[object]:
    """Makes each stream the current one of its device in this thread, and the last one's device current."""
    real = [stream for stream in streams if stream is not None]
    return _Use(real) if real else _NOTHING


class _Use:
    """Entered, it switches; left, it restores each device's stream and the current device.

    ``with stream:`` of torch keeps what it restores in the stream itself, which several threads share here.
    """

    def __init__(self, streams: list[torch.Stream]) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._before = [torch.accelerator.current_stream(stream.device) for stream in self._streams]
        try:
            for stream in self._streams:
                torch.accelerator.set_stream(stream)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        for stream in reversed(self._before):
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(self._device)
