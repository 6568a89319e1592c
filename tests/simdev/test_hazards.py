"""Hazards: what no event orders is found, what is ordered is not. No device is needed for that."""
from __future__ import annotations

from typing import Literal

from tests.simdev import Launch, Piece
from tests.simdev.hazards import hazards

Kind = Literal["op", "copy", "record", "wait", "sync", "sync device", "sync event", "alloc", "free", "keep"]


def did(
    kind: Kind, stream: int = 0, block: int = 0, event: int = 0, reads: tuple[int, ...] = (), name: str = "op"
) -> Launch:
    return Launch(kind, 0, stream, 0, event, name, 0.0, 0, tuple(map(whole, reads)), (whole(block),) if block else ())


def whole(block: int) -> Piece:
    return Piece(block, 0, 8)


ALLOC = did("alloc", 0, 1)
WRITE = did("op", 0, 1, name="write")


def read(stream: int) -> Launch:
    return did("op", stream, reads=(1,), name="read")


def test_one_stream_keeps_order() -> None:
    assert not hazards([ALLOC, WRITE, read(0), WRITE, did("free", 0, 1), did("alloc", 0, 2)])


def test_another_stream_that_does_not_wait_reads_too_early() -> None:
    found = hazards([ALLOC, WRITE, read(1)])
    assert "read on stream 1 of device 0 does not wait for write on the default stream of device 0" in found


def test_an_event_orders_what_comes_before_it() -> None:
    assert not hazards([ALLOC, WRITE, did("record", 0, event=1), did("wait", 1, event=1), read(1)])
    assert hazards([ALLOC, did("record", 0, event=1), WRITE, did("wait", 1, event=1), read(1)])
    assert hazards([ALLOC, WRITE, did("record", 0, event=1), read(1), did("wait", 1, event=1)])


def test_order_is_handed_on() -> None:
    log = [ALLOC, WRITE, did("record", 0, event=1), did("wait", 1, event=1), did("record", 1, event=2)]
    assert not hazards([*log, did("wait", 2, event=2), read(2)])


def test_a_host_that_waits_orders_what_it_launches_then() -> None:
    for wait in did("sync", 0), did("sync device"):
        assert not hazards([ALLOC, WRITE, wait, read(1)])
    assert not hazards([ALLOC, WRITE, did("record", 0, event=1), did("sync event", event=1), read(1)])
    assert hazards([ALLOC, WRITE, did("sync", 2), read(1)])


def test_a_write_waits_for_reads_of_other_streams() -> None:
    log = [ALLOC, WRITE, did("record", 0, event=1), did("wait", 1, event=1), read(1)]
    assert hazards([*log, WRITE])
    assert not hazards([*log, did("record", 1, event=2), did("wait", 0, event=2), WRITE])


def test_two_reads_need_no_order() -> None:
    log = [ALLOC, WRITE, did("record", 0, event=1), did("wait", 1, event=1), did("wait", 2, event=1)]
    assert not hazards([*log, read(1), read(2)])


def test_memory_is_not_allocated_again_while_another_stream_reads_it() -> None:
    log = [ALLOC, WRITE, did("record", 0, event=1), did("wait", 1, event=1), read(1)]
    free, again = did("free", 0, 1), did("alloc", 0, 2)
    assert "memory of the default stream of device 0 is allocated again" in str(hazards([*log, free, again]))
    assert not hazards([*log, free])
    assert not hazards([*log, free, did("record", 1, event=2), did("wait", 0, event=2), again])
    assert not hazards([*log, did("sync", 1), free, again])
    assert not hazards([*log, free, did("alloc", 1, 2)])  # Another stream's memory.


def test_streams_that_were_recorded_are_waited_for_by_the_allocator() -> None:
    log = [ALLOC, WRITE, did("record", 0, event=1), did("wait", 1, event=1), read(1)]
    again = did("alloc", 0, 2)
    assert not hazards([*log, did("keep", 1, 1), did("free", 0, 1), again])
    # With what they wait for; but not for others.
    later = [did("keep", 2, 1), did("free", 0, 1), again]
    assert hazards([*log, *later])
    assert not hazards([*log, did("record", 1, event=2), did("wait", 2, event=2), *later])


def test_blocks_from_before_the_log_are_ready() -> None:
    assert not hazards([did("op", 1, 7), did("free", 0, 7), did("keep", 1, 7)])


def test_what_is_done_with_them_since_is_ordered_as_with_others() -> None:
    assert hazards([did("op", 0, 7), did("op", 1, reads=(7,))])
    assert not hazards([did("op", 0, 7), did("record", 0, event=1), did("wait", 1, event=1), did("op", 1, reads=(7,))])


def test_pieces_of_a_block_that_do_not_meet_need_no_order() -> None:
    def half(stream: int, first: int) -> Launch:
        return did("op", stream, 1)._replace(writes=(Piece(1, first, first + 4),))

    ordered = [ALLOC, did("record", 0, event=1), did("wait", 1, event=1)]
    assert not hazards([*ordered, half(0, 0), half(1, 4)])
    assert hazards([*ordered, half(0, 0), half(1, 2)])
    assert hazards([*ordered, half(0, 0), half(0, 4), half(1, 4)])
