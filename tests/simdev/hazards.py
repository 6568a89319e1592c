"""Hazards: what a device does with memory while another stream may still, or already, be at work with it.

A log says what streams were given. Only events, and a host that waits, order what two streams do: each stream has a
vector clock, which says how much of every other stream's work is done before its own. Two uses of a block of memory
that neither is ordered before the other, one of them a write, are a hazard, however the run went.

Memory is a stream's that allocates it. Freed, the next allocation on that stream may get it, so it is a hazard if
other streams' work with it is not done by then. Streams that were recorded (``record_stream``) are waited for by the
allocator, up to all that they were given when the memory was freed, with what that waits for itself.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from . import Launch, Piece

#: Device and number.
_Stream = tuple[int, int]
#: Of each stream, how many of its launches are done.
_Clock = dict[_Stream, int]


class _Use(NamedTuple):
    """What a stream did with a piece of a block: when, by its own count."""

    stream: _Stream
    at: int
    name: str
    piece: Piece

    def __str__(self) -> str:
        return f"{self.name} on {_named(self.stream)}"


@dataclass
class _Block:
    allocated: _Use | None
    written: list[_Use] = field(default_factory=list)
    read: list[_Use] = field(default_factory=list)
    used: dict[_Stream, _Use] = field(default_factory=dict)
    kept: set[_Stream] = field(default_factory=set)


def hazards(launches: Sequence[Launch]) -> Counter[str]:
    """The hazards of a log, in words, and how often each was found.

    Args:
        launches: the log. Blocks that were allocated before it are taken to be ready for everybody at its start.
    """
    found = _Hazards()
    for launch in launches:
        found.take(launch)
    return found.found


class _Hazards:
    """The state behind one launch of the log."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._clocks: dict[_Stream, _Clock] = {}
        self._host: _Clock = {}
        self._events: dict[int, _Clock] = {}
        self._blocks: dict[int, _Block] = {}
        #: Of each stream: uses by others of what it may allocate again.
        self._freed: dict[_Stream, list[_Use]] = {}

    def take(self, launch: Launch) -> None:
        stream = launch.device, launch.stream
        if launch.kind in ("op", "copy"):
            self._use(launch, stream)
        elif launch.kind == "record":
            self._tick(stream)
            self._events[launch.event] = dict(self._clock(stream))
        elif launch.kind == "wait":
            _join(self._clock(stream), self._events.get(launch.event, {}))
        elif launch.kind == "sync":
            _join(self._host, self._clock(stream))
        elif launch.kind == "sync device":
            for other, clock in self._clocks.items():
                if other[0] == launch.device:
                    _join(self._host, clock)
        elif launch.kind == "sync event":
            _join(self._host, self._events.get(launch.event, {}))
        elif launch.kind == "alloc":
            self._allocate(launch.writes[0], stream)
        elif launch.kind == "free":
            self._free(launch.writes[0].block)
        elif launch.writes[0].block in self._blocks:
            self._blocks[launch.writes[0].block].kept.add(stream)

    def _clock(self, stream: _Stream) -> _Clock:
        return self._clocks.setdefault(stream, {})

    def _tick(self, stream: _Stream) -> int:
        clock = self._clock(stream)
        _join(clock, self._host)  # What the host has waited for is done before anything it launches now.
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def _done(self, use: _Use, stream: _Stream) -> bool:
        return use.stream == stream or self._clock(stream).get(use.stream, 0) >= use.at

    def _use(self, launch: Launch, stream: _Stream) -> None:
        at = self._tick(stream)
        for piece in dict.fromkeys((*launch.writes, *launch.reads)):
            block = self._blocks.get(piece.block)
            if block is None:  # From before the log.
                block = self._blocks[piece.block] = _Block(None)
            use = _Use(stream, at, launch.name, piece)
            writes = piece in launch.writes
            for other in (block.allocated, *block.written, *(block.read if writes else ())):
                if other is not None and _meet(other.piece, piece) and not self._done(other, stream):
                    self.found[f"{use} does not wait for {other}"] += 1
            # What it covers is done before it, or was found.
            if writes:
                block.written = [*(it for it in block.written if not _covers(piece, it.piece)), use]
                block.read = [it for it in block.read if not _covers(piece, it.piece)]
            else:
                mine = [it for it in block.read if it.stream == stream and _covers(piece, it.piece)]
                block.read = [*(it for it in block.read if it not in mine), use]
            block.used[stream] = use

    def _allocate(self, piece: Piece, stream: _Stream) -> None:
        self._blocks[piece.block] = _Block(_Use(stream, self._tick(stream), "allocation", piece))
        pool, self._freed[stream] = self._freed.get(stream, []), []
        for other in pool:
            if not self._done(other, stream):
                self._freed[stream].append(other)
                self.found[f"memory of {_named(stream)} is allocated again and does not wait for {other}"] += 1

    def _free(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if block is None or block.allocated is None:
            return
        owner = block.allocated.stream
        self._freed.setdefault(owner, []).extend(
            use for stream, use in block.used.items()
            if stream != owner and self._host.get(stream, 0) < use.at
            and not any(self._done(use, kept) for kept in block.kept)
        )


def _meet(one: Piece, other: Piece) -> bool:
    return one.first < other.last and other.first < one.last


def _covers(one: Piece, other: Piece) -> bool:
    return one.first <= other.first and other.last <= one.last


def _join(clock: _Clock, other: _Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def _named(stream: _Stream) -> str:
    return f"stream {stream[1]} of device {stream[0]}" if stream[1] else f"the default stream of device {stream[0]}"
