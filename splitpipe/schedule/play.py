"""Plays a schedule: every op starts as soon as its device is free and what it needs has arrived."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitpipe.schedule.op import Kind, Op, Schedule, given, needed

Times = Mapping[Kind, Sequence[float]]


def play(
    schedule: Schedule, times: Times, hops: Sequence[float] = (), again: Mapping[Op, float] | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of each op, a row for each device; where devices wait for each other, of the ops before.

    Args:
        schedule: to play.
        times: of each kind of op in each stage.
        hops: from each stage to the next one, and back; none: they take no time.
        again: what ops take before they wait for others; their start is counted as if it came just before the rest.
    """
    stages = schedule.stages
    hops = hops or [0.0] * stages
    starts: list[list[float]] = [[] for _ in schedule.rows]
    ends: list[list[float]] = [[] for _ in schedule.rows]
    done: dict[Op, float] = {}
    waiting: dict[Op, list[int]] = {}
    ready = list(range(schedule.devices))
    while ready:
        device = ready.pop()
        row, own_starts, own_ends = schedule.rows[device], starts[device], ends[device]
        now = own_ends[-1] if own_ends else 0.0
        for position in range(len(own_ends), len(row)):
            op = row[position]
            needs = needed(op, stages)
            missing = [need for need in needs if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(device)
                break
            ahead = again.get(op, 0.0) if again else 0.0
            now += ahead
            for need in needs:
                other = need.stage
                now = max(now, done[need] + (0.0 if other == op.stage else hops[min(other, op.stage)]))
            own_starts.append(now - ahead)
            now += times[op.kind][op.stage]
            own_ends.append(now)
            done[given(op)] = now
            ready += waiting.pop(given(op), ())
    return starts, ends
