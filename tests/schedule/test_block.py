"""A block is repeated without collisions, and what it says of its memory holds."""
from __future__ import annotations

import pytest

from splitpipe.schedule import BlockOp, BuildingBlock, Costs, build, check


def one_f_one_b(p: int) -> BuildingBlock:
    ops = [BlockOp("F", i, i) for i in range(p)] + [BlockOp("BW", i, 3 * p - 2 - 2 * i) for i in range(p)]
    return BuildingBlock(ops, range(p), interval=3)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_the_block_of_1f1b_gives_1f1b(p: int, m: int) -> None:
    assert one_f_one_b(p).repeat(m) == build("1f1b", p, m)
    assert one_f_one_b(p).peak_activations == tuple(range(p, 0, -1))


def two_stages(second: float) -> list[BlockOp]:
    """The second stage starts then."""
    return [BlockOp("F", 0, 0), BlockOp("F", 1, second), BlockOp("BW", 1, 2), BlockOp("BW", 0, 4)]


@pytest.mark.parametrize(("block", "message"), [
    (BuildingBlock([BlockOp("F", 0, 0), BlockOp("B", 0, 1), BlockOp("W", 0, 9)], [0], interval=4),
     r"0B0, which starts at 1 .* 0W0, which starts at 9: device 0 .* slot 1 mod"),
    (BuildingBlock([BlockOp("F", 0, 0), BlockOp("BW", 0, 2)], [0], interval=3),  # It ends in the next interval.
     r"0BW0, .* collides with 0F0, .* slot 0 modulo the interval of 3"),
    (BuildingBlock(two_stages(0.5), [0, 1], interval=9),
     "1F0 starts at 0.5, and 0F0, which it needs, ends at 1: expected"),
    (BuildingBlock(two_stages(1), [0, 1], 9, Costs(copy=0.5)), r"1F0 starts at 1, .* is copied until 1\.5: expected"),
])
def test_a_pass_that_collides_or_comes_too_early_is_refused_with_both(block: BuildingBlock, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block.repeat(2)


@pytest.mark.parametrize(("ops", "message"), [
    ([BlockOp("F", 0, 0), BlockOp("B", 0, 1)], "0W0 is missing on device 0"),
    ([BlockOp("F", 0, 0), BlockOp("BW", 0, 1), BlockOp("F", 0, 4)], "0F0 is on device 0 as op"),
    ([BlockOp("F", 0, 0), BlockOp("BW", 0, 1), BlockOp("F", 0, 3, 2), BlockOp("BW", 0, 4, 2)], "missing on device 0"),
    ([], "no ops"),
])
def test_a_block_that_is_no_whole_is_refused(ops: list[BlockOp], message: str) -> None:
    block = BuildingBlock(ops, [0], interval=9)
    with pytest.raises(ValueError, match=message):
        block.repeat(1)
    with pytest.raises(ValueError, match=message):
        _ = block.peak_activations


def test_of_a_block_of_two_microbatches_all_lifespans_count_and_the_surplus_is_dropped() -> None:
    ops = [BlockOp("F", 0, 0), BlockOp("F", 0, 1, 1), BlockOp("BW", 0, 2), BlockOp("BW", 0, 4, 1)]
    block = BuildingBlock(ops, [0], interval=6)
    assert block.peak_activations == (2,)
    for m in range(1, 6):
        check(repeated := block.repeat(m))
        assert repeated.microbatches == m


def test_lifespans_of_all_stages_count() -> None:
    two = [BlockOp("F", 0, 0), BlockOp("F", 1, 1), BlockOp("BW", 1, 2), BlockOp("BW", 0, 10)]
    assert BuildingBlock(two, [0, 0], interval=6).peak_activations == (1.5,)


def test_between_stages_of_one_device_there_is_no_copy() -> None:
    BuildingBlock(two_stages(1), [0, 0], 9, Costs([1, 1], [1, 1], [1, 1], copy=0.5)).repeat(1)
