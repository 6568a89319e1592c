"""Schedules that are defined by a building block: repeated, squeezed, reordered.

Devices are counted by i, p of them; m microbatches; the stages of one device by c, v of them. An op takes one slot, a
BW two. Each function gives one schedule, name to name with ``build``.

On V placement a microbatch goes four legs: F down the devices and up again, then B down and up. A block says in how
many slots it goes from one device to the next on each leg, and how long each of the three turns takes.

Warm-up and cool-down may take as much memory on each device as steady work takes where it takes most.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from splitpipe.schedule.construct.block import BlockOp, BuildingBlock
from splitpipe.schedule.construct.orders import v_placement
from splitpipe.schedule.op import Kind, Schedule
from splitpipe.schedule.plurals import counted

#: Slots from one block to the next: F, B and W of two stages, or of two microbatches.
PERIOD = 6


def v_min(p: int, m: int) -> Schedule:
    """The shortest lives that a V allows: a third of 1F1B's memory. (arXiv 2405.15362, V-Min)"""
    wait = 0 if p % 3 else 2  # B would collide with F.
    return _v(p, m, hops=(1, 1, 1, 1), turns=(1, 1 + wait, 1))


def v_half(p: int, m: int) -> Schedule:
    """Half of 1F1B's memory, and less idle than it. (arXiv 2405.15362, V-Half)"""
    wait = 0 if p % 2 else 3  # B would collide with F.
    return _v(p, m, hops=(2, 1, 2, 1), turns=(1, 1 + wait, 2))


def v_zb(p: int, m: int) -> Schedule:
    """Idle only until the last device has its first F, with 1F1B's memory, if F = B = W. (arXiv 2405.15362, V-ZB)"""
    return _v(p, m, hops=(4, 2, 4, 2), turns=(1, 1, 1))


def _v(p: int, m: int, hops: Sequence[int], turns: Sequence[int]) -> Schedule:
    forwards = list(_walk("F", p, hops[:2], turns[0]))
    backwards = _walk("B", p, hops[2:], turns[2], forwards[-1].start + turns[1])
    return _built(_weighed([*forwards, *backwards], v_placement(p)), v_placement(p), PERIOD, m)


def _walk(kind: Kind, p: int, hops: Sequence[int], turn: int, start: float = 0) -> Iterator[BlockOp]:
    """Two legs, down the devices and up again: through all stages, for B from the last one."""
    for leg, hop in enumerate(hops):
        for step in range(p):
            stage = leg * p + step
            yield BlockOp(kind, stage if kind == "F" else 2 * p - 1 - stage, start)
            start += hop if step < p - 1 else turn


def one_f_one_b_v(p: int, m: int) -> Schedule:
    """1F1B on V placement, each backward pass in one: about two thirds of its memory. (arXiv 2405.15362, appendix)

    Of a device's six slots F takes two, and leaves two runs of two. B of the second stage, on its way down, takes the
    next run that it can; B of the first, on its way up, the other.
    """
    ops = list(_walk("F", p, (1, 1), 1))
    runs = [_free(ops[i].start, ops[2 * p - 1 - i].start) for i in range(p)]
    now = ops[-1].start + 1
    for stage in reversed(range(2 * p)):
        own = runs[v_placement(p)[stage]]
        while now % PERIOD not in own:
            now += 1
        own.remove(now % PERIOD)
        ops.append(BlockOp("BW", stage, now))
        now += 2
    return _built(ops, v_placement(p), PERIOD, m)


def _free(one: float, other: float) -> set[float]:
    """The starts of the two runs of two free slots, modulo the period, if two slots at an odd distance are taken."""
    free = [(other + after) % PERIOD for after in range(1, PERIOD) if (other + after - one) % PERIOD]
    return {free[0], free[2]}


def two_thirds(p: int, m: int) -> Schedule:
    """About two thirds of 1F1B's memory with one stage a device. (arXiv 2405.15362, appendix)

    A block holds two microbatches. On a device F has slots of one parity and B slots of the other, so they never
    collide.
    """
    ops = []
    for i in range(p):
        for k in (0, 1):
            ops += [BlockOp("F", i, i + 2 * k, k), BlockOp("B", i, 2 * p - 1 - i + 2 * k, k)]
    return _built(_weighed(ops, range(p)), range(p), PERIOD, m)


def interleaved_low_memory(p: int, m: int, stages_per_device: int = 2, group: int | None = None) -> Schedule:
    """Interleaved 1F1B with fewer F ahead, and each W right after its B. (arXiv 2405.15362, appendix)

    So many of a ``group`` go through a stage before its device turns to the next one (None: p). The peak is
    (group * (v - 1) + p) / v microbatches, and idle is (p - group) * (v - 1) / v ops more than with p, if it divides m.
    """
    v, g = stages_per_device, p if group is None else group
    if not p <= 2 * g <= 2 * p:
        raise ValueError(
            f"group={g} with {counted(p, 'device')}: expected {-(-p // 2)} to {p}, from half of the devices to all "
            "of them."
        )
    # From stage to stage of a device, F and B have 3g slots to go around all devices. A hop takes F one slot and B two,
    # so that they don't collide. The first devices keep to that as long as B gets around, the others do the reverse.
    loop = 3 * g
    at = [i + max(0, i - (loop - p)) for i in range(p)]
    ops: list[BlockOp] = []
    for k, c, i in product(range(g), range(v), range(p)):
        forward = 3 * k + at[i] + c * loop
        backward = forward + (v - 1) * loop + 3 * (p - 1 - i) + 1
        back = (v - 1 - c) * p + i
        ops.append(BlockOp("F", c * p + i, forward, k))
        ops += [BlockOp("B", back, backward, k), BlockOp("W", back, backward + 1, k)]
    return _built(ops, [i for _ in range(v) for i in range(p)], v * loop, m, level=False)


def _weighed(ops: Sequence[BlockOp], placement: Sequence[int]) -> list[BlockOp]:
    """Ops with each W in the first slot after its B that is free, the first B first."""
    taken = {(placement[one.stage], one.start % PERIOD) for one in ops}
    weights = []
    for one in sorted((one for one in ops if one.kind == "B"), key=lambda one: one.start):
        start = one.start + 1
        while (placement[one.stage], start % PERIOD) in taken:
            start += 1
        taken.add((placement[one.stage], start % PERIOD))
        weights.append(BlockOp("W", one.stage, start, one.microbatch))
    return [*ops, *weights]


def _built(ops: Iterable[BlockOp], placement: Iterable[int], interval: int, m: int, level: bool = True) -> Schedule:
    tiling = BuildingBlock(tuple(ops), tuple(placement), interval).repeat(m).squeeze()
    tiling = tiling.reorder(max(tiling.peak_activations) if level else 0)
    return Schedule(tiling.rows, tiling.placement)
