"""Schedules that are defined by a building block: repeated, and reordered.

p is the number of devices, i a device; m the number of microbatches; v the number of stages per device, c one of them.
An op takes one slot, a BW two. Each function returns one schedule, with the same name as in ``build``.
With V placement, a microbatch goes four legs: F down the devices and up again, then B down and up. A block specifies
the number of slots from one device to the next on each leg, and the length of each of the three turns.

On each device, warm-up and cool-down may take as much memory as the steady state takes at its peak.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from splitpipe.schedule.construct.block import BlockOp, BuildingBlock
from splitpipe.schedule.construct.orders import v_placement
from splitpipe.schedule.construct.reorder import reorder
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Schedule, counted

#: Slots from one block to the next: for F, B and W of two stages, or of two microbatches.
PERIOD = 6


def v_min(p: int, m: int) -> Schedule:
    """The shortest lifespans that V placement allows: a third of 1F1B's memory. (arXiv 2405.15362, V-Min)"""
    wait = 0 if p % 3 else 2  # Otherwise, B would collide with F.
    return _v(p, m, hops=(1, 1, 1, 1), turns=(1, 1 + wait, 1))


def v_half(p: int, m: int) -> Schedule:
    """Half of 1F1B's memory, and less idle time. (arXiv 2405.15362, V-Half)"""
    wait = 0 if p % 2 else 3  # Otherwise, B would collide with F.
    return _v(p, m, hops=(2, 1, 2, 1), turns=(1, 1 + wait, 2))


def v_zb(p: int, m: int) -> Schedule:
    """Idle only until the last device's first F, with 1F1B's memory, if F = B = W. (arXiv 2405.15362, V-ZB)"""
    return _v(p, m, hops=(4, 2, 4, 2), turns=(1, 1, 1))


def _v(p: int, m: int, hops: Sequence[int], turns: Sequence[int]) -> Schedule:
    forwards = list(_walk("F", p, hops[:2], turns[0]))
    backwards = _walk("B", p, hops[2:], turns[2], forwards[-1].start + turns[1])
    return _build(_with_weights([*forwards, *backwards], v_placement(p)), v_placement(p), PERIOD, m)


def _walk(kind: Kind, p: int, hops: Sequence[int], turn: int, start: float = 0) -> Iterator[BlockOp]:
    """Two legs, down the devices and up again, through all stages; for B, starting at the last stage."""
    for leg, hop in enumerate(hops):
        for step in range(p):
            stage = leg * p + step
            yield BlockOp(kind, stage if kind == "F" else 2 * p - 1 - stage, start)
            start += hop if step < p - 1 else turn


def one_f_one_b_v(p: int, m: int) -> Schedule:
    """1F1B with V placement and unsplit backward: about two thirds of its memory. (arXiv 2405.15362, appendix)

    F takes two of a device's six slots, and leaves two runs of two slots. B of the second stage, on its way down, takes
    the next possible run; B of the first stage, on its way up, takes the other.
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
    return _build(ops, v_placement(p), PERIOD, m)


def _free(one: float, other: float) -> set[float]:
    """The starts of the two runs of two free slots, modulo the period, if two slots an odd distance apart are taken."""
    free = [(other + after) % PERIOD for after in range(1, PERIOD) if (other + after - one) % PERIOD]
    return {free[0], free[2]}


def two_thirds(p: int, m: int) -> Schedule:
    """About two thirds of 1F1B's memory with one stage per device. (arXiv 2405.15362, appendix)

    A block holds two microbatches. On each device, F has slots of one parity and B slots of the other, so they never
    collide.
    """
    ops = []
    for i in range(p):
        for k in (0, 1):
            ops += [BlockOp("F", i, i + 2 * k, k), BlockOp("B", i, 2 * p - 1 - i + 2 * k, k)]
    return _build(_with_weights(ops, range(p)), range(p), PERIOD, m)


def interleaved_low_memory(p: int, m: int, stages_per_device: int = 2, group: int | None = None) -> Schedule:
    """Interleaved 1F1B with fewer F in advance, and each W right after its B. (arXiv 2405.15362, appendix)

    ``group`` microbatches pass through a stage before its device turns to the next stage (None: p). The peak is (group
    * (v - 1) + p) / v microbatches, and idle time is (p - group) * (v - 1) / v ops longer than with group = p, if group
    divides m.
    """
    v, g = stages_per_device, p if group is None else group
    if not p <= 2 * g <= 2 * p:
        raise ValueError(f"group={g} with {counted(p, 'device')}: expected {-(-p // 2)} to {p}.")
    # From stage to stage of a device, F and B have 3g slots to pass all devices. A hop takes F one slot and B two, so
    # that they don't collide. The first devices keep to that as long as B gets around; for the others, it is reversed.
    loop = 3 * g
    at = [i + max(0, i - (loop - p)) for i in range(p)]
    ops: list[BlockOp] = []
    for k, c, i in product(range(g), range(v), range(p)):
        forward = 3 * k + at[i] + c * loop
        backward = forward + (v - 1) * loop + 3 * (p - 1 - i) + 1
        back = (v - 1 - c) * p + i
        ops.append(BlockOp("F", c * p + i, forward, k))
        ops += [BlockOp("B", back, backward, k), BlockOp("W", back, backward + 1, k)]
    return _build(ops, [i for _ in range(v) for i in range(p)], v * loop, m, level=False)


def _with_weights(ops: Sequence[BlockOp], placement: Sequence[int]) -> list[BlockOp]:
    """Ops with each W in the first free slot after its B, the first B first."""
    busy = {(placement[one.stage], one.start % PERIOD) for one in ops}
    weights = []
    for one in sorted((one for one in ops if one.kind == "B"), key=lambda one: one.start):
        start = one.start + 1
        while (placement[one.stage], start % PERIOD) in busy:
            start += 1
        busy.add((placement[one.stage], start % PERIOD))
        weights.append(BlockOp("W", one.stage, start, one.microbatch))
    return [*ops, *weights]


def _build(ops: Sequence[BlockOp], placement: Sequence[int], interval: int, m: int, level: bool = True) -> Schedule:
    slots = [1] * len(placement)
    repeated = BuildingBlock(ops, placement, interval).repeat(m)
    return reorder(repeated, Costs(slots, slots, slots), max(repeated.peak_activations) if level else 0)
