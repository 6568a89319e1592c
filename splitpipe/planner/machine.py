"""The machine that a plan is for: kinds of devices, their free bytes, and the times between ops.

A pipeline costs more than its layers: there is also the time from one op to the next, and that of copies.
"""
from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from statistics import fmean, median

import torch
from torch import nn

from splitpipe.balance.units import Chain
from splitpipe.core.stream import Place
from splitpipe.core.worker import in_new_thread
from splitpipe.partition.by_bytes import asked, memory_of
from splitpipe.pipe import SplitPipe
from splitpipe.planner.profile import Link
from splitpipe.schedule.recording.recording import Recording

# The fraction of an accelerator's free memory that a plan uses; the rest is for workspaces and fragmentation.
USABLE = 0.9
# A copy of this size shows the bandwidth of any link.
_LARGEST = 2**26
_SMALL = 16
_CHUNKS = 8
_STEPS = 6


def kinds_of(places: Sequence[Place]) -> dict[str, list[int]]:
    """The rows of each kind of device; a kind has one name and capacity."""
    found: dict[tuple[str, float], list[int]] = {}
    for row, place in enumerate(places):
        name, capacity = "cpu", math.inf
        if place.device.type != "cpu":
            name = asked(place.device, "get_device_name") or place.device.type
            _, capacity = asked(place.device, "get_memory_info", "mem_get_info") or (0, math.inf)
        found.setdefault((name, capacity), []).append(row)
    kinds: dict[str, list[int]] = {}
    for (name, _), rows in found.items():
        kinds[f"{name} ({len(kinds)})" if name in kinds else name] = rows
    return kinds


def workspace(device: torch.device) -> int:
    """Bytes that torch keeps for matrix products of one thread on one stream, as in its CublasHandlePool.cpp."""
    if device.type != "cuda":
        return 0
    lighter = int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", 1024)) * 2**10
    given = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return lighter + sum(int(size) * int(count) for size, count in given) * 2**10
    hopper = torch.version.hip is not None or torch.cuda.get_device_capability(device) == (9, 0)
    return lighter + (32 * 2**20 if hopper else 2 * 2**22 + 8 * 2**14)


def usable_bytes(module: nn.Module, places: Sequence[Place], memory: Sequence[float] | None) -> list[float]:
    """Bytes that each row may use: those that were given, or its share of the free ones."""
    if memory is not None:
        return list(memory)
    devices = [place.device for place in places]
    free = {device: memory_of(device, module) for device in set(devices)}
    return [
        math.inf if (size := free[device]) is None else size * USABLE / devices.count(device) for device in devices
    ]


@contextmanager
def shared_threads(rows: int) -> Iterator[None]:
    """Sets the number of intra-op threads of each of ``rows`` CPU stages; restores it after the block."""
    own, others = torch.get_num_threads(), in_new_thread(torch.get_num_threads)
    try:
        torch.set_num_threads(max(1, own // rows))
        yield
    finally:
        torch.set_num_threads(own)
        # The number that is set last also applies to threads that start later.
        in_new_thread(partial(torch.set_num_threads, others))


def gap(place: Place, by_cuts: bool = False) -> float:
    """Milliseconds from one op's start to the next one's in a stage that computes nothing."""
    found: dict[str, list[float]] = {}
    row = _recorded([place], "zb-h1", _SMALL, by_cuts).spans[0]
    for now, after in zip(row, row[1:]):
        found.setdefault(now.op.kind, []).append(after.start - now.start)
    return fmean(max(0.0, median(times)) for times in found.values())


def link(places: Sequence[Place], largest: int) -> Link:
    """The slowest link between two of the places, for layers that pass each other at most ``largest`` bytes."""
    pairs: dict[tuple[torch.device, torch.device], tuple[Place, Place]] = {}
    for one, two in combinations(places, 2):
        pairs.setdefault((one.device, two.device), (one, two))
    links = [_copy(pair, largest) if pair[0].device != pair[1].device else _hop(pair) for pair in pairs.values()]
    return Link(max(each.latency for each in links), min(each.bandwidth for each in links))


def _hop(pair: Sequence[Place]) -> Link:
    """The link of two stages on one device: nothing is copied, but the other stage's worker has to notice."""
    first, second = _recorded(pair, "1f1b", _SMALL).spans
    sent = {span.op.microbatch: span.end for span in first if span.op.kind == "F"}
    late, waited = [], []
    free = 0.0
    for span in second:
        if span.op.kind == "F":
            late.append(span.start - sent[span.op.microbatch])
            if free <= sent[span.op.microbatch]:
                waited.append(late[-1])
        free = span.end
    return Link(max(0.0, median(waited or late)))


def _copy(pair: Sequence[Place], largest: int) -> Link:
    large = max(_SMALL * 1024, min(largest, _LARGEST) // 4)  # In numbers of four bytes.
    fast, slow = (_recorded(pair, "1f1b", count).costs().hop for count in (_SMALL, large))
    return Link(fast, (large - _SMALL) * 4 / (slow - fast) if slow > fast else math.inf)


def _recorded(places: Sequence[Place], schedule: str, count: int, by_cuts: bool = False) -> Recording:
    """Steps of stages that compute nothing, and pass each other ``count`` numbers."""
    model = SplitPipe(
        (Chain if by_cuts else nn.Sequential)(*(nn.Identity() for _ in places)),
        cuts=list(map(str, range(1, len(places)))), devices=[place.device for place in places],
        chunks=_CHUNKS, schedule=schedule, loss_fn=lambda output, target: output[:, 0].sum(),
    )
    x = torch.zeros(_CHUNKS, count, device=places[0].device, requires_grad=True)
    target = torch.zeros(_CHUNKS, device=places[-1].device)
    with torch.autocast(places[0].device.type, enabled=False):  # In float16, a schedule would require a GradScaler.
        model(x, target=target)
        with model.record() as recording:
            for _ in range(_STEPS):
                model(x, target=target)
    return recording
