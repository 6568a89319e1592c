"""A picture of a schedule as text, for a terminal: one line per device, time from left to right."""
from __future__ import annotations

import math
from collections.abc import Sequence

from splitpipe.schedule.draw import measures
from splitpipe.schedule.op import Op
from splitpipe.schedule.timed import TimedSchedule

_NARROWEST = 20


def draw(timelines: Sequence[TimedSchedule], width: int = 120) -> str:
    """Schedules as text, one below the other on the same scale; with all measures of one, or a table for several."""
    measures.verify(timelines)
    names = max(len(str(each.schedule.devices - 1)) for each in timelines) + 1
    looks = [_Look(each) for each in timelines]
    scale = _scale(looks, max(_NARROWEST, width - names))
    blocks = [_picture(look, scale, names) for look in looks]
    words = measures.lines(timelines[0]) if len(timelines) == 1 else _table(timelines)
    return "\n\n".join([*blocks, "\n".join(words), _legend(looks, scale)])


class _Look:
    def __init__(self, timeline: TimedSchedule) -> None:
        self.timeline = timeline
        self.shares = timeline.schedule.shares
        self.turns = measures.turns(timeline.schedule.placement)

    def kind(self, op: Op) -> str:
        """The kind; the stages of a device use capital and small letters in turn."""
        return op.kind.lower() if self.turns[op.stage] % 2 else op.kind

    def label(self, op: Op) -> str:
        """Kind and microbatch, after the stage if the device has more than two."""
        return f"{op.stage if self.shares[op.stage] > 2 else ''}{self.kind(op)}{op.microbatch}"


def _scale(looks: Sequence[_Look], room: int) -> float:
    """Columns per unit of time: only as many as labels need, and whole columns for the shortest op."""
    whole = max(look.timeline.makespan for look in looks)
    times = {(len(look.label(op)), end - start) for look in looks for row in look.timeline.spans
             for op, start, end in row if end > start}
    if not times:
        return room / whole if whole else 1.0
    scale = min(room / whole, max((letters + 1) / time for letters, time in times))
    shortest = min(time for _, time in times)
    columns = math.floor(scale * shortest + 1e-6)
    return columns / shortest if columns else scale


def _picture(look: _Look, scale: float, names: int) -> str:
    timeline = look.timeline
    columns = math.ceil(timeline.makespan * scale - 1e-6)
    lines = [measures.title(timeline), "", " " * names + _axis(timeline.makespan, scale, columns)]
    for device, row in enumerate(timeline.spans):
        cells = ["."] * columns
        for op, start, end in row:  # Of several ops in a column, it shows the one in its middle.
            begin, stop = round(start * scale), min(columns, round(end * scale))
            label, width = look.label(op), stop - begin
            cells[begin:stop] = (label if len(label) <= width else look.kind(op)[:width]).ljust(width)
        lines.append(f"{device:>{names - 1}} {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _axis(whole: float, scale: float, columns: int) -> str:
    line = ""
    for tick in measures.ticks(whole, most=max(1, columns // 8)):
        at = round(tick * scale)
        if at >= len(line) + bool(line) and at + len(measures.short(tick)) <= columns + 8:
            line = line.ljust(at) + measures.short(tick)
    return line


def _table(timelines: Sequence[TimedSchedule]) -> list[str]:
    names = ["makespan", "bubble", "longest", "its bubble", "peak activations"]
    rows = [[measures.name(each), *(measures.texts(each)[name] for name in names)] for each in timelines]
    return measures.aligned([["", *names], *rows], "<>>>><")


def _legend(looks: Sequence[_Look], scale: float) -> str:
    parts = [f"{kind} {meaning}" for kind, meaning in measures.meanings([look.timeline for look in looks]).items()]
    parts.append(". idle")
    if any(max(look.shares) > 1 for look in looks):
        parts.append("capital and small letters: the stages of a device in turn")
    if scale < 1:
        parts.append(f"a column lasts {measures.short(1 / scale)}, and shows one op")
    return ", ".join(parts)
