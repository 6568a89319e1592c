"""Bytes that torch's caching allocator would have reserved: a pool for each stream, with blocks that come back late.

A block belongs to the pool of the stream that it was allocated on, and comes back to it when it is freed. A block that
other streams were recorded with (``record_stream``) comes back once these have done all that they were given before
the free. When that is depends on how far the host is ahead:

* at once, if devices are done when the host is;
* when the host has waited for it, by a ``.item()`` say, if devices begin no sooner than they have to. The allocator
  looks at its events whenever it allocates, so real memory lies between the two.

Here a pool has no gaps and gives nothing back: its reserved bytes are the most that it ever had in use. The real one
rounds sizes up, and where the memory ends it waits for what is to come back before it fails.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import Launch
from .clocks import Clock, Clocks, Stream


@dataclass
class _Pool:
    used: int = 0
    most: int = 0


@dataclass
class _Block:
    pool: Stream
    size: int
    kept: set[Stream] = field(default_factory=set)


def reserved(launches: Sequence[Launch], ahead: bool) -> dict[Stream, int]:
    """The reserved bytes of each pool.

    Args:
        launches: the log. Blocks that were allocated before it count for nothing.
        ahead: whether the host is as far ahead of the devices as it can be; else they are done when it is.
    """
    clocks, blocks, pools = Clocks(), dict[int, _Block](), dict[Stream, _Pool]()
    late: list[tuple[_Block, Clock]] = []
    for launch in launches:
        stream = launch.device, launch.stream
        if launch.kind == "alloc":
            late = _returned(late, clocks.host, pools)
            block = blocks[launch.writes[0].block] = _Block(stream, launch.bytes)
            pool = pools.setdefault(stream, _Pool())
            pool.used += block.size
            pool.most = max(pool.most, pool.used)
        elif launch.kind == "keep" and launch.writes[0].block in blocks:
            blocks[launch.writes[0].block].kept.add(stream)
        elif launch.kind == "free" and launch.writes[0].block in blocks:
            block = blocks.pop(launch.writes[0].block)
            others = {other: clocks.of(other).get(other, 0) for other in block.kept - {block.pool}}
            late.append((block, others if ahead else {}))
        elif launch.kind in ("op", "copy"):
            clocks.tick(stream)
        else:
            clocks.take(launch)
    return {stream: pool.most for stream, pool in pools.items()}


def _returned(late: list[tuple[_Block, Clock]], host: Clock, pools: dict[Stream, _Pool]) -> list[tuple[_Block, Clock]]:
    """Blocks whose time has come go back to their pools; the others."""
    left = []
    for block, clock in late:
        if all(host.get(stream, 0) >= count for stream, count in clock.items()):
            pools[block.pool].used -= block.size
        else:
            left.append((block, clock))
    return left
