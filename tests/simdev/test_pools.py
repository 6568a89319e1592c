"""Pools: what a stream frees it has again, others' blocks come back late. No device is needed for that."""
from __future__ import annotations

from typing import Literal

from tests.simdev import Launch, Piece
from tests.simdev.pools import reserved

Kind = Literal["op", "record", "wait", "sync", "alloc", "free", "keep"]


def did(kind: Kind, stream: int = 0, block: int = 0, event: int = 0, size: int = 0) -> Launch:
    return Launch(kind, 0, stream, 0, event, "-", 0.0, size, (), (Piece(block, 0, size),))


def most(*log: Launch, ahead: bool = True) -> dict[int, int]:
    return {stream: size for (_, stream), size in reserved(log, ahead).items()}


FIRST, FREE = did("alloc", 0, 1, size=8), did("free", 0, 1)


def test_a_stream_has_again_what_it_frees() -> None:
    assert most(FIRST, FREE, did("alloc", 0, 2, size=6)) == {0: 8}
    assert most(FIRST, did("alloc", 0, 2, size=6)) == {0: 14}


def test_no_stream_has_what_another_one_frees() -> None:
    assert most(FIRST, FREE, did("alloc", 1, 2, size=6)) == {0: 8, 1: 6}


def test_a_block_that_another_stream_reads_comes_back_when_the_host_has_waited_for_that() -> None:
    log = [FIRST, did("keep", 1, 1), did("op", 1), FREE]
    again = did("alloc", 0, 2, size=8)
    assert most(*log, again) == {0: 16}
    assert most(*log, again, ahead=False) == {0: 8}
    assert most(*log, did("sync", 0), again) == {0: 16}
    assert most(*log, did("sync", 1), again) == {0: 8}
    assert most(*log, did("record", 1, event=1), did("wait", 0, event=1), did("sync", 0), again) == {0: 8}
    assert most(*log[:2], did("sync", 1), *log[2:], again) == {0: 16}


def test_a_stream_that_is_recorded_with_its_own_block_changes_nothing() -> None:
    assert most(FIRST, did("keep", 0, 1), did("op", 0), FREE, did("alloc", 0, 2, size=8)) == {0: 8}
