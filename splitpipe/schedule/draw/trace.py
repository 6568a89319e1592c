"""A schedule as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing."""
from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from splitpipe.schedule.costs import real
from splitpipe.schedule.draw import measures, palette
from splitpipe.schedule.timed import TimedSchedule

Event = dict[str, Any]


def draw(played: Sequence[TimedSchedule], unit: float = 1000.0) -> str:
    """Schedules as trace events: one process per schedule, one thread per device, and counters of what is alive."""
    measures.verify(played)
    if not 0 < real(unit) < math.inf:
        raise ValueError(f"unit={unit!r}: expected a positive number of microseconds per unit of the costs.")
    for each in played:
        if not math.isfinite(each.makespan * unit):
            raise ValueError(
                f"{measures.title(each)}: the makespan is {each.makespan:g}, which is too many microseconds at "
                f"unit={unit:g}: expected smaller costs, or a smaller unit."
            )
    events = [event for number, each in enumerate(played) for event in _schedule(number, each, unit)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _schedule(pid: int, played: TimedSchedule, unit: float) -> list[Event]:
    events = [_named(pid, 0, "process_name", name=measures.title(played)),
              _named(pid, 0, "process_sort_index", sort_index=pid)]
    for device, row in enumerate(played.spans):
        events.append(_named(pid, device, "thread_name", name=f"device {device}"))
        events.append(_named(pid, device, "thread_sort_index", sort_index=device))
        for op, start, end in row:
            args = {"op": op.kind, "stage": op.stage, "microbatch": op.microbatch}
            events.append({"ph": "X", "pid": pid, "tid": device, "name": str(op), "cat": palette.MEANING[op.kind],
                           "ts": start * unit, "dur": (end - start) * unit, "args": args})
    return events + _counters(pid, played, unit)


def _counters(pid: int, played: TimedSchedule, unit: float) -> list[Event]:
    """Counters of what is alive on each device: in microbatches on all its stages, and in bytes if known."""
    events: list[Event] = []
    for device in range(played.schedule.devices):
        kinds = [(f"device {device}: activations", "microbatches", measures.alive(played, device))]
        if played.bytes is not None:
            kinds.append((f"device {device}: bytes", "bytes", measures.steps(played.curve(device, played.bytes))))
        for name, what, curve in kinds:
            for time, value in curve:
                events.append({"ph": "C", "pid": pid, "tid": device, "name": name, "ts": time * unit,
                               "args": {what: value}})
    return events


def _named(pid: int, tid: int, what: str, **args: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}
