"""A device's stream, or None for the CPU, where work is done when the call returns and every operation is a no-op.

The streams and events of a device's module (``torch.cuda``) and torch's generic ones don't know each other's records,
and two streams with the same number aren't equal. So all have the device's own class here (``of_device_class``), and no
other file makes or records any. This class releases the GIL in calls to the driver, which are long if a queue is full.

An event is recorded once, by ``mark``, so every wait for it, in any thread, is for the same work.

No contexts: a device's context takes half a GiB, and setting the device creates one. Code that sets a device restores
the previous one like torch.accelerator.device_index, by an exchange that creates no context.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.torch_private import _accelerator_maybeExchangeDevice

Stream = torch.Stream | None
#: Returns a device's stream with a name, always the same: ``cache(new)``.
NamedStreams = Callable[[torch.device, str], Stream]


@cache
def _kind(device: torch.device) -> tuple[Any, Any]:
    """The classes of a device's streams and events."""
    module = torch.get_device_module(device)
    return getattr(module, "Stream", torch.Stream), getattr(module, "Event", torch.Event)


def of_device_class(stream: torch.Stream) -> torch.Stream:
    """The stream as an instance of the class that is used here for all streams of its device."""
    made_by: type[torch.Stream] = _kind(stream.device)[0]
    if type(stream) is made_by:
        return stream
    return made_by(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current(device: torch.device) -> Stream:
    """The stream on which this thread queues work for ``device``."""
    return None if device.type == "cpu" else of_device_class(torch.accelerator.current_stream(device.index))


def new(device: torch.device, name: str = "weights") -> Stream:
    """A new stream of ``device``: for weight gradients, or, with any other name, for copies."""
    # Smaller numbers are served first. Copies are waited for, and their kernels are small, so they go first. Weight
    # gradients have 0, as the default stream: they yield to stages that compute on a user's stream with -1.
    return None if device.type == "cpu" else _kind(device)[0](device=device, priority=0 if name == "weights" else -1)


def bind(device: torch.device) -> None:
    """Gives this thread, which starts on device 0 without a context, the device with its context."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        # Setting the device that is already set would do nothing.
        torch.accelerator.current_stream(device.index).query()


def wait(stream: Stream, other: Stream) -> None:
    """Makes later work on ``stream`` wait for the work queued on ``other`` so far."""
    if stream is not None and other is not None and stream != other:
        event: Any = mark(other)
        event.wait(stream)


def mark(stream: Stream) -> torch.Event | None:
    """An event after the work queued on ``stream`` so far."""
    if stream is None:
        return None
    event: torch.Event = _kind(stream.device)[1]()
    event.record(stream)
    return event


def moment(stream: torch.Stream) -> Any:
    """An event that records when the stream reaches it."""
    event = _kind(stream.device)[1](enable_timing=True)
    event.record(stream)
    return event


def wait_for(stream: Stream, event: torch.Event) -> None:
    """Makes later work on ``stream`` wait for the event."""
    if stream is not None:
        event.wait(stream)


def hold(tensor: Tensor, stream: Stream) -> None:
    """Prevents the memory of ``tensor``, if it is freed, from being reused before ``stream`` has read it."""
    if stream is not None and tensor.device == stream.device:
        tensor.record_stream(stream)


def use(*streams: Stream) -> AbstractContextManager[None]:
    """Makes each stream its device's current one in this thread, and the last one's device current."""
    real = [stream for stream in streams if stream is not None]
    return _using(real) if real else nullcontext()


@contextmanager
def _using(streams: Sequence[torch.Stream]) -> Iterator[None]:
    # Not torch's ``with stream:``, which keeps the previous ones in the stream, which threads share.
    device, before = torch.accelerator.current_device_index(), list[torch.Stream]()
    try:
        for stream in streams:
            before.append(torch.accelerator.current_stream(stream.device_index))
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in reversed(before):
            torch.accelerator.set_stream(stream)
        # Like the end of torch.accelerator.device_index; using that guard here would take as long as everything else.
        _accelerator_maybeExchangeDevice(device)


Device = torch.device | int | str | torch.Stream


@dataclass(frozen=True)
class Place:
    """A stage's place: a device and, if the user gave one, the stream of it to compute on."""

    device: torch.device
    stream: torch.Stream | None = None

    def __reduce__(self) -> tuple[type[Place], tuple[torch.device]]:
        # A stream belongs to its process: a copied or unpickled place computes on the device's current one.
        return Place, (self.device,)

    def __str__(self) -> str:
        return str(self.device)
