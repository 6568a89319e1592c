"""Schedules that are defined by the order of each device's ops.

p is the number of devices, i a device; m the number of microbatches, k one of them; v the number of stages per device,
c one of them. Each function returns one schedule, with the same name as in ``build``.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count

from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Kind, Op, Schedule
from splitpipe.schedule.play import OpOrder

Row = list[Op]


def gpipe(p: int, m: int, split: bool = False) -> Schedule:
    """All F, then all backward passes. GPipe (arXiv 1811.06965, section 2.3).

    With ``split``, all B and then all W: 2BP (arXiv 2405.18047, section 3); its "naive" variant, if m is 1.
    """
    kinds: tuple[Kind, ...] = ("F", "B", "W") if split else ("F", "BW")
    return Schedule([[Op(kind, i, k) for kind in kinds for k in range(m)] for i in range(p)], range(p))


def one_f_one_b(p: int, m: int, split: bool = False) -> Schedule:
    """F and BW alternate, after a warm-up of F. PipeDream-Flush (arXiv 2006.09503, section 2).

    With ``split``, W fills idle slots, and the rest of them come last: 2BP (arXiv 2405.18047, section 3).
    """
    return _one_f_one_b(p, m, split, ahead=1)


def eager_one_f_one_b(p: int, m: int, split: bool = False) -> Schedule:
    """1F1B with twice as many F in advance, which gives copies the time of an op (arXiv 2211.05953, section 4)."""
    return _one_f_one_b(p, m, split, ahead=2)


def _one_f_one_b(p: int, m: int, split: bool, ahead: int) -> Schedule:
    kind: Kind = "B" if split else "BW"
    rows = [in_turn(_all("F", i, m), [[op] for op in _all(kind, i, m)], ahead * (p - 1 - i)) for i in range(p)]
    return fill_idle(Schedule(rows, range(p))) if split else Schedule(rows, range(p))


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with W postponed to fill the bubble, with the memory of 1F1B's first stage. (arXiv 2401.10241, 2)"""
    return _zero_bubble(p, m, ahead=1)


def zb_h2(p: int, m: int) -> Schedule:
    """Twice as many F in advance; no bubble within a device's span. (arXiv 2401.10241, section 2)"""
    return _zero_bubble(p, m, ahead=2)


def _zero_bubble(p: int, m: int, ahead: int) -> Schedule:
    rows = []
    for i in range(p):
        late = ahead * i  # By how many B does W lag behind.
        weights = _all("W", i, m)
        backwards = [[op, weights[k - late]] if k >= late else [op] for k, op in enumerate(_all("B", i, m))]
        rows.append(in_turn(_all("F", i, m), backwards, ahead * (p - 1 - i)) + weights[max(0, m - late):])
    return Schedule(rows, range(p))


def interleaved_one_f_one_b(p: int, m: int, stages_per_device: int = 2) -> Schedule:
    """1F1B on several smaller stages per device, in groups of p microbatches. (arXiv 2104.04473, section 2.2)"""
    v, whole = stages_per_device, -(-m // p) * p
    order = [(c, group + k) for group in range(0, whole, p) for c in range(v) for k in range(p)]
    rows = []
    for i in range(p):
        forwards = [Op("F", c * p + i, k) for c, k in order]
        backwards = [[Op("BW", (v - 1 - c) * p + i, k)] for c, k in order]
        rows.append(in_turn(forwards, backwards, 2 * (p - 1 - i) + (v - 1) * p))
    return first(Schedule(rows, [i for _ in range(v) for i in range(p)]), m)


def looped_bfs(p: int, m: int, stages_per_device: int = 2) -> Schedule:
    """All F of a device's first stage, then all of its second; backward in reverse. (arXiv 2211.05953)"""
    loops = range(stages_per_device)
    rows = [
        [Op("F", c * p + i, k) for c in loops for k in range(m)]
        + [Op("BW", c * p + i, k) for c in reversed(loops) for k in range(m)]
        for i in range(p)
    ]
    return Schedule(rows, [i for _ in loops for i in range(p)])


def zb_v(p: int, m: int) -> Schedule:
    """No bubble within a device's span if F = B = W, with 1F1B's memory. (arXiv 2401.10241, section 6)"""
    n = max(m, 2 * p - 1)
    rows = []
    for i in range(p):
        it = _Device(i, p)
        it.take("F0", 2 * (p - i) - 1)
        it.take("F1 F0", i)
        it.take("F1 B1 W1", p - i)
        it.take("F0 B0 W0 F1 B1 W1", n - 2 * p + i + 1)
        it.take("B0 W0 F1 B1 W1", p - i - 1)
        it.take("B0 B1", i)
        it.take("B0 W0", p - i)
        it.take("W", i + i)
        rows.append(it.row)
    return first(Schedule(rows, v_placement(p)), m)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe cut in half (arXiv 2412.19437, section 3.2.1). For fewer than 2p microbatches, the first m of 2p."""
    n = max(m, 2 * p)
    rows = []
    for i in range(p):
        it = _Device(i, p)
        it.take("F0", 2 * (p - i - 1))
        it.take("F0 F1", i + 1)
        it.take("B1 W1 F1", p - i - 1)
        it.take("F0 BW1 F1 BW0", n - 2 * p + i + 1)
        it.take("BW1 F1 BW0", p - i - 1)
        # There are 2(i + 1) backward ops, and the second half of them is split.
        for k in range(2 * (i + 1)):
            it.take(("B" if k > i else "BW") + str((k + 1) % 2), 1)
        it.take("W B0", p - i - 1)
        it.take("W", i + 1)
        rows.append(it.row)
    return first(Schedule(rows, v_placement(p)), m)


class _Device:
    """A device's row under construction, for V placement; each op is of the next microbatch of its kind and stage."""

    def __init__(self, device: int, devices: int) -> None:
        self.row: Row = []
        self._stages = {"0": device, "1": 2 * devices - 1 - device}
        self._microbatches = {(way, c): count() for way in "FB" for c in "01"}
        self._pending: Row = []  # The W of previous B.

    def take(self, names: str, times: int) -> None:
        """Appends ops, ``times`` times: "F0" is an F of the first stage, "BW1" a BW of the second, "W" the oldest W."""
        for name in names.split() * times:
            c = name[-1]
            if name[0] == "W":
                op = next(op for op in self._pending if c == "W" or op.stage == self._stages[c])
                self._pending.remove(op)
            else:
                kind: Kind = "F" if name[0] == "F" else "B" if name[1] == c else "BW"
                op = Op(kind, self._stages[c], next(self._microbatches[name[0], c]))
                if kind == "B":
                    self._pending.append(Op("W", op.stage, op.microbatch))
            self.row.append(op)


def v_placement(p: int) -> list[int]:
    """Stages go down the devices and up again, so that the first device has the first stage and the last."""
    return [*range(p), *reversed(range(p))]


def in_turn(forwards: Row, backwards: Sequence[Iterable[Op]], warm: int) -> Row:
    """``warm`` forwards, then forwards and backwards in turn."""
    row = forwards[:warm]
    for k, backward in enumerate(backwards):
        row += [*forwards[warm + k : warm + k + 1], *backward]
    return row


def first(schedule: Schedule, m: int) -> Schedule:
    """The first m microbatches of a schedule. They don't depend on the others, so they can run without them."""
    if schedule.microbatches <= m:
        return schedule
    return Schedule([[op for op in row if op.microbatch < m] for row in schedule.rows], schedule.placement)


def fill_idle(schedule: Schedule) -> Schedule:
    """F and B, with W where a device waits, as many as fit if each takes one slot; the rest of the W at the end."""
    starts, ends = OpOrder(schedule).play(Costs())
    rows = []
    for row, began, ended in zip(schedule.rows, starts, ends):
        ops: Row = []
        waiting: deque[Op] = deque()
        free = 0.0
        for op, start, end in zip(row, began, ended):
            while waiting and free + 1 <= start:
                ops.append(waiting.popleft())
                free += 1
            ops.append(op)
            free = end
            if op.kind == "B":
                waiting.append(Op("W", op.stage, op.microbatch))
        rows.append([*ops, *waiting])
    return Schedule(rows, schedule.placement)


def _all(kind: Kind, stage: int, m: int) -> Row:
    return [Op(kind, stage, k) for k in range(m)]
