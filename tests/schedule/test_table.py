"""Blocks written down by their table, as anybody would by hand: times of each pass on device i, W where it fits."""
from __future__ import annotations

import pytest

from splitpipe.schedule import BlockOp, BuildingBlock, Costs, build, check, simulate

T = 6


def v_block(p: int, times: list[list[int]]) -> BuildingBlock:
    """A block from F0, F1, B1 and B0 of each device, with W in the first free slot modulo T after its B."""
    ops, placement = [], [*range(p), *reversed(range(p))]
    for i, (f0, f1, b1, b0) in enumerate(times):
        stages = i, 2 * p - 1 - i
        own = [BlockOp("F", stages[0], f0), BlockOp("F", stages[1], f1)]
        own += [BlockOp("B", stages[1], b1), BlockOp("B", stages[0], b0)]
        taken = {one.start % T for one in own}
        for one in sorted(own[2:], key=lambda one: one.start):
            start = one.start + 1
            while start % T in taken:
                start += 1
            taken.add(start % T)
            own.append(BlockOp("W", one.stage, start))
        ops += own
    return BuildingBlock(ops, placement, T)


def v_min(p: int) -> BuildingBlock:
    z = 2 if p % 3 == 0 else 0
    return v_block(p, [[i, 2 * p - 1 - i, 2 * p + z + i, 4 * p + z - 1 - i] for i in range(p)])


def v_half(p: int) -> BuildingBlock:
    z = 3 if p % 2 == 0 else 0
    return v_block(p, [[2 * i, 3 * p - 2 - i, 3 * p - 1 + z + 2 * i, 6 * p - 2 + z - i] for i in range(p)])


@pytest.mark.parametrize(
    "p", [1, 2, 3, 4, 8, *(pytest.param(p, marks=pytest.mark.thorough) for p in (*range(5, 8), *range(9, 14), 32))]
)
def test_the_tables_tile_for_every_number_of_devices_with_their_memory(p: int) -> None:
    for block, peak in ((v_min(p), 2 * ((p + 4) // 3)), (v_half(p), 2 * ((p + 2) // 2))):
        tiling = block.repeat(2 * p + 1)
        check(tiling)
        assert 2 * max(tiling.peak_activations) == peak
        assert all(a <= b for a, b in zip(tiling.peak_activations, block.peak_activations))


def test_replayed_as_they_are_v_half_takes_thirty_and_reordered_less() -> None:
    squeezed = v_half(4).repeat(8).squeeze()
    assert squeezed.makespan / 2 == 30  # In halves of a device's pass.
    assert squeezed.reorder().makespan / 2 <= 27.5
    assert simulate(build("v-half", 4, 8)).makespan == 26.5


def test_a_collision_names_both_passes_and_the_slot() -> None:
    wrong = v_block(4, [[2 * i, 3 * 4 - 2 - i, 3 * 4 - 1 + 2 * i, 6 * 4 - 2 - i] for i in range(4)])
    with pytest.raises(ValueError, match=r"B.*F|F.*B") as caught:
        wrong.repeat(8)
    assert "slot" in str(caught.value) or "modulo" in str(caught.value)


@pytest.mark.parametrize(("name", "idle"), [("1f1b", 27), ("zb-h1", 15)])
def test_idle_at_real_costs(name: str, idle: float) -> None:
    assert simulate(build(name, 4, 8), Costs(3, 4, 2)).idle == (idle,) * 4


def test_zb_h2_idles_nine_at_real_costs_within_its_longest_span() -> None:
    timeline = simulate(build("zb-h2", 4, 8), Costs(3, 4, 2))
    assert timeline.longest - timeline.work[0] == 9
