"""Virtual time: when each launch of a log would have run, on streams that keep order and engines that do one at a time.

A device has an engine that computes and one that copies. A stream gives its next launch to an engine when the one
before it is done, and what it was to wait for, too. An engine that is free takes, of what streams offer it, the
launch of the lowest priority number, and among those the one that the host launched first.
"""
from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .log import Launch

#: Device and number.
_Stream = tuple[int, int]
_Engine = tuple[int, Literal["compute", "copy"]]


@dataclass(frozen=True)
class Span:
    """When one launch ran; the launches that took no time have none."""

    device: int
    engine: Literal["compute", "copy"]
    name: str
    start: float
    end: float


def replay(launches: Sequence[Launch], cost: Callable[[Launch], float]) -> list[Span]:
    """Runs a log in virtual time: spans in the order of their starts.

    What was launched before the log counts as done; ``cost`` is of an op or a copy.
    """
    queues: dict[_Stream, deque[tuple[int, Launch]]] = {}
    for number, launch in enumerate(launches):
        queues.setdefault((launch.device, launch.stream), deque()).append((number, launch))
    to_come = {launch.event for launch in launches if launch.kind == "record"}
    #: What engines do, by its end; a stream stands still meanwhile.
    running: list[tuple[float, _Stream, _Engine]] = []
    spans: list[Span] = []
    now = 0.0
    while True:
        standing, taken = {stream for _, stream, _ in running}, {engine for _, _, engine in running}
        offers = _offers({stream: queue for stream, queue in queues.items() if stream not in standing}, to_come, cost)
        for _, _, launch, takes in offers:
            engine: _Engine = launch.device, "copy" if launch.kind == "copy" else "compute"
            if engine not in taken:
                taken.add(engine)
                stream = launch.device, launch.stream
                queues[stream].popleft()
                heapq.heappush(running, (now + takes, stream, engine))
                spans.append(Span(*engine, launch.name, now, now + takes))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            heapq.heappop(running)
    if left := {stream: queue[0][1] for stream, queue in queues.items() if queue}:
        raise RuntimeError(f"streams wait for ever, each at the launch shown: {left}")
    return spans


def _offers(idle: dict[_Stream, deque[tuple[int, Launch]]], to_come: set[int],
            cost: Callable[[Launch], float]) -> list[tuple[int, int, Launch, float]]:
    """Does all that takes no time. What idle streams offer then: priority, number, launch, how long it takes."""
    before = -1
    offers: dict[_Stream, tuple[int, int, Launch, float]] = {}
    while before != (before := sum(map(len, idle.values()))):
        for stream, queue in idle.items():
            while queue and stream not in offers:
                number, launch = queue[0]
                if launch.kind == "wait" and launch.event in to_come:
                    break
                takes = cost(launch) if launch.kind in ("op", "copy") else 0.0
                if takes:
                    offers[stream] = launch.priority, number, launch, takes
                    break
                if launch.kind == "record":
                    to_come.discard(launch.event)
                queue.popleft()
    return sorted(offers.values(), key=lambda offer: offer[:2])
