"""Hazards: what a device does with memory while another stream may still, or already, be at work with it.

A log says what streams were given. Only events, and a host that waits, order what two streams do: each stream has a
vector clock, which says how much of every other stream's work is done before its own. Two uses of a block of memory
that neither is ordered before the other, one of them a write, are a hazard, however the run went.

Memory is a stream's that allocates it. Freed, the next allocation on that stream may get it, so it is a hazard if
other streams' work with it is not done at that time. The allocator waits for streams that were recorded
(``record_stream``), up to all that they were given when the memory was freed, with what that waits for itself.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from . import Launch, Piece
from .clocks import Clocks, Stream


class _Use(NamedTuple):
    """What a stream did with a piece of a block: when, by its own count."""

    stream: Stream
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
    used: dict[Stream, _Use] = field(default_factory=dict)
    kept: set[Stream] = field(default_factory=set)


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
        self._clocks = Clocks()
        self._blocks: dict[int, _Block] = {}
        #: Of each stream: uses by others of what it may allocate again.
        self._freed: dict[Stream, list[_Use]] = {}

    def take(self, launch: Launch) -> None:
        stream = launch.device, launch.stream
        if launch.kind in ("op", "copy"):
            self._use(launch, stream)
        elif launch.kind == "alloc":
            self._allocate(launch.writes[0], stream)
        elif launch.kind == "free":
            self._free(launch.writes[0].block)
        elif launch.kind != "keep":
            self._clocks.take(launch)
        elif launch.writes[0].block in self._blocks:
            self._blocks[launch.writes[0].block].kept.add(stream)

    def _done(self, use: _Use, stream: Stream) -> bool:
        return use.stream == stream or self._clocks.of(stream).get(use.stream, 0) >= use.at

    def _use(self, launch: Launch, stream: Stream) -> None:
        at = self._clocks.tick(stream)
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

    def _allocate(self, piece: Piece, stream: Stream) -> None:
        self._blocks[piece.block] = _Block(_Use(stream, self._clocks.tick(stream), "allocation", piece))
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
            if stream != owner and self._clocks.host.get(stream, 0) < use.at
            and not any(self._done(use, kept) for kept in block.kept)
        )


def _meet(one: Piece, other: Piece) -> bool:
    return one.first < other.last and other.first < one.last


def _covers(one: Piece, other: Piece) -> bool:
    return one.first <= other.first and other.last <= one.last


def _named(stream: Stream) -> str:
    return f"stream {stream[1]} of device {stream[0]}" if stream[1] else f"the default stream of device {stream[0]}"
