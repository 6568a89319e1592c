"""What a pipeline costs besides its layers: from one op to the next, and from one device to another."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, median

import torch
from torch import Tensor, nn

from splitpipe.balance.layers import Flow
from splitpipe.core.stream import Place
from splitpipe.pipe import SplitPipe
from splitpipe.planner.probe import ROWS, Probe, Times
from splitpipe.planner.profile import Link
from splitpipe.schedule.recording.recording import Recording

#: A copy this large tells the bandwidth of any link.
_LARGEST = 2**26
_SMALL = 16
_CHUNKS = 8
_STEPS = 6


def entry(flow: Flow, place: Place, chunks: int) -> Times:
    """What ops of a probe take without its layer, at this moment.

    Args:
        flow: what the layer takes.
        place: where it computes.
        chunks: that the batch is cut into.
    """
    probe = Probe([("(none)", nn.Identity())], Flow((flow.value, list(flow.skips.values())), {}), place, chunks)
    probe.first()
    (found,) = probe.times(lambda done: done < _STEPS * ROWS)
    return found


def gap(place: Place) -> float:
    """Milliseconds from one op's start to the next one's, of a stage that computes nothing.

    Args:
        place: where.
    """
    found: dict[str, list[float]] = {}
    row = _recorded([place], "zb-h1", _SMALL).spans[0]
    for now, after in zip(row, row[1:]):
        found.setdefault(now.op.kind, []).append(after.start - now.start)
    return fmean(max(0.0, median(times)) for times in found.values())


def link(places: Sequence[Place], largest: int) -> Link:
    """The slowest link between two of the places.

    Args:
        places: the devices, two at least.
        largest: bytes that layers give each other, at most.
    """
    pairs: dict[tuple[torch.device, torch.device], tuple[Place, Place]] = {}
    for one, two in combinations(places, 2):
        pairs.setdefault((one.device, two.device), (one, two))
    links = [_hop(pair) if pair[0].device == pair[1].device else _copy(pair, largest) for pair in pairs.values()]
    return Link(max(each.latency for each in links), min(each.bandwidth for each in links))


def _hop(pair: Sequence[Place]) -> Link:
    """Nothing is copied, but the other stage's worker has to notice."""
    first, second = _recorded(pair, "1f1b", _SMALL).spans
    sent = {span.op.microbatch: span.end for span in first if span.op.kind == "F"}
    all_, waited = [], []
    free = 0.0
    for span in second:
        if span.op.kind == "F":
            late = span.start - sent[span.op.microbatch]
            all_.append(late)
            if free <= sent[span.op.microbatch]:
                waited.append(late)
        free = span.end
    return Link(max(0.0, median(waited or all_)))


def _copy(pair: Sequence[Place], largest: int) -> Link:
    large = max(_SMALL * 1024, min(largest, _LARGEST) // 4)  # Numbers of four bytes.
    fast, slow = (_time(pair, count) for count in (_SMALL, large))
    more = slow - fast
    return Link(fast, (large - _SMALL) * 4 / more if more > 0 else float("inf"))


def _time(pair: Sequence[Place], count: int) -> float:
    copy = _recorded(pair, "1f1b", count).costs().copy
    return copy if isinstance(copy, (int, float)) else max(copy)


def _recorded(places: Sequence[Place], schedule: str, count: int) -> Recording:
    """Steps of stages that compute nothing, and give each other so many numbers."""
    devices: list[torch.device | torch.Stream] = [place.stream or place.device for place in places]
    model = SplitPipe(
        nn.Sequential(*(nn.Identity() for _ in places)), [1] * len(places), devices=devices, chunks=_CHUNKS,
        schedule=schedule, loss_fn=_free,
    )
    x = torch.zeros(_CHUNKS, count, device=places[0].device, requires_grad=True)
    target = torch.zeros(_CHUNKS, device=places[-1].device)
    with torch.autocast(places[0].device.type, enabled=False):  # In float16 a schedule would want a GradScaler.
        model(x, target=target)
        with model.record() as recording:
            for _ in range(_STEPS):
                model(x, target=target)
    return recording


def _free(output: Tensor, target: Tensor) -> Tensor:
    return output[:, 0].sum()
