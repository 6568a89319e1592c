"""A picture of a schedule as text, for a terminal: one line per device, time from left to right."""
from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TextIO

from splitpipe.schedule.draw import measures, palette
from splitpipe.schedule.op import Kind, Op
from splitpipe.schedule.timed import Span, TimedSchedule

# The kind of op that a column shows, its stage's number on the device, and how many stages there are. No kind: idle.
Style = tuple[Kind | None, int, int]
Cell = tuple[str, Style]

_IDLE: Cell = (".", (None, 0, 0))
_NARROWEST = 20


def draw(played: Sequence[TimedSchedule], width: int = 120, colour: bool = False) -> str:
    """Schedules as text, one below the other on the same scale; with all measures of one, or a table for several."""
    measures.verify(played)
    names = max(len(str(each.schedule.devices - 1)) for each in played) + 1
    looks = [_Look(each, colour) for each in played]
    scale = _scale(looks, max(_NARROWEST, width - names))
    blocks = [_picture(look, scale, names) for look in looks]
    words = measures.lines(played[0]) if len(played) == 1 else _table(played)
    return "\n\n".join([*blocks, "\n".join(words), _legend(looks, scale)])


def wants_colour(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """True if a stream should get colour: as NO_COLOR or FORCE_COLOR specify, or else if it is a capable terminal."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return environment.get("TERM") != "dumb" and stream.isatty()


class _Look:
    """How a schedule's ops look. With colour, which shows the kind, a narrow cell has room for the microbatch."""

    def __init__(self, played: TimedSchedule, colour: bool) -> None:
        self.played, self.colour = played, colour
        self.shares = played.schedule.shares
        self.turns = palette.turns(played.schedule.placement)
        self.mean = sum(played.work) / sum(map(len, played.spans))  # The mean time of an op.

    def style(self, op: Op) -> Style:
        return op.kind, self.turns[op.stage], self.shares[op.stage]

    def kind(self, op: Op) -> str:
        """The kind; the stages of a device use capital and small letters in turn."""
        return op.kind.lower() if self.turns[op.stage] % 2 else op.kind

    def label(self, op: Op) -> str:
        """Kind and microbatch, after the stage if the device has more than two."""
        return f"{op.stage if self.shares[op.stage] > 2 else ''}{self.kind(op)}{op.microbatch}"

    def fitting(self, op: Op, width: int) -> str:
        """As much of the label as fits into a cell."""
        label = self.label(op)
        if len(label) <= width:
            return label
        if self.colour:
            label = str(op.microbatch)
            return label if len(label) <= width else ""
        return self.kind(op)[:width]


def _scale(looks: Sequence[_Look], room: int) -> float:
    """Columns per unit of time: only as many as labels need, and whole columns for the step that divides all times."""
    whole = max(look.played.makespan for look in looks)
    if not whole:
        return 1.0
    natural = max((
        (len(look.label(span.op)) + 1) / (span.end - span.start)
        for look in looks for row in look.played.spans for span in row if span.end > span.start
    ), default=math.inf)
    step = _step([time for look in looks for time in _times(look.played)])
    columns = math.floor(min(room / whole, natural) * step + 1e-6)
    return columns / step if columns else min(room / whole, natural)


def _times(played: TimedSchedule) -> set[float]:
    costs = played.costs()
    return {*costs.hops(played.schedule), *(time for each in costs.times(played.schedule).values() for time in each)}


def _step(times: Sequence[float]) -> float:
    """The longest time that divides all times, up to rounding, by Euclid's algorithm."""
    step, small = 0.0, 1e-6 * max(times)
    for time in times:
        while time > small:
            rest = math.fmod(step, time)
            step, time = time, 0.0 if time - rest <= small else rest
    return step


def _picture(look: _Look, scale: float, names: int) -> str:
    """The schedule's name, a line with times, and one line per device."""
    played = look.played
    columns = math.ceil(played.makespan * scale - 1e-6)
    row_of = _cells if look.mean * scale >= 1 else _mixed
    lines = [measures.title(played), "", " " * names + _axis(played.makespan, scale, columns)]
    for device, row in enumerate(played.spans):
        cells = row_of(look, row, scale, columns)
        text = _coloured(cells) if look.colour else "".join(letter for letter, _ in cells).rstrip()
        lines.append(f"{device:>{names - 1}} {text}".rstrip())
    return "\n".join(lines)


def _cells(look: _Look, row: Sequence[Span], scale: float, columns: int) -> list[Cell]:
    """One op per cell."""
    cells = [_IDLE] * columns
    for op, start, end in row:
        first, last = round(start * scale), min(columns, round(end * scale))
        style = look.style(op)
        cells[first:last] = [(letter, style) for letter in look.fitting(op, last - first).ljust(last - first)]
    return cells


def _mixed(look: _Look, row: Sequence[Span], scale: float, columns: int) -> list[Cell]:
    """Several ops per column, of which it shows one, so that each kind gets its share of the line."""
    shares: list[dict[Style, float]] = [{} for _ in range(columns)]
    letters: dict[Style, str] = {_IDLE[1]: _IDLE[0]}
    for op, start, end in row:
        style = look.style(op)
        letters[style] = " " if look.colour else look.kind(op)[0]
        for column in range(int(start * scale), min(columns, math.ceil(end * scale))):
            part = min(end * scale, column + 1) - max(start * scale, column)
            shares[column][style] = shares[column].get(style, 0.0) + part
    owed: dict[Style, float] = defaultdict(float)
    cells = []
    for share in shares:
        share[_IDLE[1]] = max(0.0, 1 - sum(share.values()))
        for style, part in share.items():
            owed[style] += part
        shown = max((style for style, part in share.items() if part > 1e-6), key=lambda style: owed[style])
        owed[shown] -= 1
        cells.append((letters[shown], shown))
    return cells


def _axis(whole: float, scale: float, columns: int) -> str:
    line = ""
    for tick in measures.ticks(whole, most=max(1, columns // 8)):
        at = round(tick * scale)
        if at >= len(line) + bool(line) and at + len(measures.short(tick)) <= columns + 8:
            line = line.ljust(at) + measures.short(tick)
    return line


def _coloured(cells: Sequence[Cell]) -> str:
    runs = groupby(cells, key=lambda cell: cell[1])
    return "".join(_painted("".join(letter for letter, _ in run), style) for style, run in runs)


def _painted(text: str, style: Style) -> str:
    kind, turn, turns = style
    if kind is None:
        return f"\x1b[2m{text}\x1b[0m"
    return f"\x1b[38;5;16;48;5;{palette.terminal(kind, turn, turns)}m{text}\x1b[0m"


def _table(played: Sequence[TimedSchedule]) -> list[str]:
    """The measures of several schedules, one line each."""
    rows = [["", "makespan", "bubble", "longest", "its bubble", "peak activations"]]
    for each in played:
        rows.append([
            measures.name(each),
            measures.short(each.makespan), measures.percent(each.bubble),
            measures.short(each.longest), measures.percent(each.bubble_longest),
            measures.each_device(each.peak_activations),
        ])
    return measures.aligned(rows, "<>>>><")


def _legend(looks: Sequence[_Look], scale: float) -> str:
    parts = []
    for kind, meaning in measures.meanings([look.played for look in looks]).items():
        key = _painted(f" {kind} ", (kind, 0, 1)) if looks[0].colour else kind
        parts.append(f"{key} {meaning}")
    parts.append(". idle")
    if any(max(look.shares) > 1 for look in looks):
        parts.append("capital and small letters: the stages of a device in turn")
    if scale < 1:
        parts.append(f"a column lasts {measures.short(1 / scale)}")
    if any(0 < look.mean * scale < 1 for look in looks):
        parts.append("and shows one of the ops in it")
    return ", ".join(parts)
