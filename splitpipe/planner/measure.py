"""The measurements on which a plan is based: of layers, of the time between ops, and of copies.

A pipeline costs more than its layers: there is also the time from one op to the next, and that of copies. Both are
measured on stages that compute nothing. Times are in milliseconds.
"""
from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch

from splitpipe.balance.rig import MICROBATCHES, Layer, measure, record_idle
from splitpipe.balance.survey import Subject, measuring
from splitpipe.core.stream import Place

_SMALL, _LARGEST = 16, 2**24  # Numbers that are copied: the latter shows the bandwidth of any link.


@dataclass(frozen=True)
class Device:
    """One device that stages may be on."""

    name: str  # As ``SplitPipe`` accepts it.
    memory: float = math.inf  # Bytes that the plan may use; infinite if unknown.


@dataclass(frozen=True)
class Profile:
    """The costs of layers on devices of one kind."""

    names: tuple[str, ...]  # The layers' names, or those of other units between two cuts.
    layers: Mapping[int, tuple[Layer, ...]]  # Their costs by number of chunks.
    devices: tuple[Device, ...]
    gap: float = 0.0  # The time that a worker takes from one op to the next.
    latency: float = 0.0  # Of an empty copy from one device to the next.
    bandwidth: float = math.inf  # Bytes per millisecond.
    optimizer_state: float = 2.0  # Bytes that the optimizer keeps per byte of parameters.
    tied: tuple[tuple[int, int], ...] = ()  # Pairs of layers that share a tensor, so they must be on one device.
    layered: bool = True  # Whether it is of an nn.Sequential.
    # Whether each device computes as fast as if it were alone. Stages on one CPU don't: all of its threads were divided
    # among them when they were measured, and a plan has to use them all.
    own_compute: bool = True


def profile(
    subject: Subject, target: Any, loss_fn: Callable[..., Any] | None, places: Sequence[Place], chunks: Sequence[int],
    *, compile: bool | Mapping[str, Any], memory: Sequence[float], optimizer_state: float, seconds: float,
) -> Profile:
    """The costs of a module's units on some devices, for each number of chunks that layers and memory allow."""
    on_cpu, threads = sum(place.device.type == "cpu" for place in places), torch.get_num_threads()
    layers: dict[int, tuple[Layer, ...]] = {}
    torch.set_num_threads(max(1, threads // max(1, on_cpu)))  # Stages on the CPU share them.
    try:
        for count in chunks:
            try:
                layers[count] = tuple(measure(subject, places, count, seconds / len(chunks), loss_fn, target, compile))
            except Exception as error:
                # Fewer rows than a layer needs, or more than the device has memory for.
                if not layers and not (isinstance(error, torch.OutOfMemoryError) and count != chunks[-1]):
                    raise
                traceback.clear_frames(error.__traceback__)  # They refer to the tensors that didn't fit.
        largest = max(layer.input for row in layers.values() for layer in row)
        pairs = {(one.device, two.device): (one, two) for one, two in zip(places, places[1:])}
        with measuring(places[0].device):
            gap = _gap(places[0], subject.layered)
            links = [_link(pair, largest, subject.layered) for pair in pairs.values()]
    finally:
        torch.set_num_threads(threads)
    latency = max([latency for latency, _ in links], default=0.0)
    bandwidth = min([bandwidth for _, bandwidth in links], default=math.inf)
    devices = tuple(Device(str(place), room) for place, room in zip(places, memory))
    tied = _tied(subject) if subject.layered else ()
    return Profile(
        subject.names, layers, devices, gap, latency, bandwidth, optimizer_state, tied, subject.layered, on_cpu < 2
    )


def _tied(subject: Subject) -> tuple[tuple[int, int], ...]:
    """Pairs of layers that share a parameter or buffer."""
    layers = subject.module._modules.values()
    own = [{id(x) for x in (*layer.parameters(), *layer.buffers())} for layer in layers if layer is not None]
    return tuple(pair for pair in combinations(range(len(own)), 2) if own[pair[0]] & own[pair[1]])


def _gap(place: Place, layered: bool) -> float:
    """Milliseconds from one op's start to the next one's in a stage that computes nothing."""
    found: dict[str, list[float]] = {}
    row = record_idle([place], layered, 1, MICROBATCHES).spans[0]
    for now, after in zip(row, row[1:]):
        found.setdefault(now.op.kind, []).append(after.start - now.start)
    return fmean(max(0.0, median(times)) for times in found.values())


def _link(pair: Sequence[Place], largest: int, layered: bool) -> tuple[float, float]:
    """Latency and bandwidth between two places, for layers that pass each other at most ``largest`` bytes."""
    recording = record_idle(pair, layered, 2, 1, _SMALL)
    if pair[0].device == pair[1].device:  # Nothing is copied, but the other stage's worker has to notice.
        first, second = recording.spans
        return max(0.0, second[0].start - first[0].end), math.inf
    large = max(_SMALL * 1024, min(largest // 4, _LARGEST))
    recordings = recording, record_idle(pair, layered, 2, 1, large)
    fast, slow = (each.costs().hops(each.schedule)[0] for each in recordings)
    return fast, (large - _SMALL) * 4 / (slow - fast) if slow > fast else math.inf
