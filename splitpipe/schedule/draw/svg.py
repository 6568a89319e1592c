"""A picture of a schedule as a self-contained SVG, readable on light and dark backgrounds."""
from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from xml.sax.saxutils import escape

from splitpipe.schedule.draw import measures, palette
from splitpipe.schedule.op import Kind
from splitpipe.schedule.timed import Span, TimedSchedule

_LEFT, _EDGE = 64, 12  # Margins: for the devices' names, and on the other side.
_ROW, _BAR = 28, 22  # The height of a device's row, and of its ops.
_LINE = 16  # The height of a line of text.
_CELL = 24  # The width of the shortest op, if there is room.
_PLOT = (640, 1600)
_LETTER = 6.2
_GREY = "#767676"  # Equally far from white and black.
_MANY = 4000  # With more ops, they aren't named individually.


def draw(played: Sequence[TimedSchedule]) -> str:
    """Schedules as one picture, one below the other on the same scale. Hovering over an op shows its name and times."""
    measures.verify(played)
    spans = [span for each in played for row in each.spans for span in row]
    whole = max(each.makespan for each in played)
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=whole)
    plot = min(max(whole / shortest * _CELL, _PLOT[0]), _PLOT[1]) if whole else _PLOT[0]
    scale = plot / whole if whole else 1.0
    width = _LEFT + plot + _EDGE
    parts: list[str] = []
    top = 0.0
    for each in played:
        lines, height = _schedule(each, scale, top, int((plot + _LEFT) / _LETTER), len(spans) > _MANY)
        parts += lines
        top += height
    parts += _legend(played, top)
    height = top + 2 * _LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" font-family="system-ui, sans-serif" font-size="11" fill="{_GREY}">',
        f"<title>{escape('; '.join(map(measures.title, played)))}</title>",
        *parts,
        "</svg>",
        "",
    ])


def _schedule(played: TimedSchedule, scale: float, top: float, letters: int, many: bool) -> tuple[list[str], float]:
    """One schedule: its name, its devices, its axis and its measures; and the height of these."""
    rows = top + 28
    bottom = rows + _ROW * played.schedule.devices
    right = _LEFT + played.makespan * scale
    parts = [f'<text x="{_EDGE}" y="{_n(top + 18)}" font-size="13" font-weight="600">'
             f"{escape(measures.title(played))}</text>"]
    ticks = measures.ticks(played.makespan, most=int(played.makespan * scale / 48))
    at = [_n(_LEFT + tick * scale) for tick in ticks]
    lines = "".join(f"M{x} {_n(rows)}V{_n(bottom + 2)}" for x in at)
    parts.append(f'<path d="{lines}" stroke="{_GREY}" stroke-opacity=".35" fill="none"/>')
    parts.append('<g text-anchor="middle">')
    parts += [f'<text x="{x}" y="{_n(bottom + 14)}">{measures.short(tick)}</text>' for x, tick in zip(at, ticks)]
    parts.append("</g>")
    turns = palette.turns(played.schedule.placement)
    for device, row in enumerate(played.spans):
        y = rows + _ROW * device
        parts.append(f'<g transform="translate({_LEFT} {_n(y + (_ROW - _BAR) / 2)})">')
        parts.append(f'<rect width="{_n(right - _LEFT)}" height="{_BAR}" fill-opacity=".12"/>')
        parts.append(f'<text x="{_EDGE - _LEFT}" y="15">device {device}</text>')
        parts += _device(played, row, turns, scale, many)
        parts.append("</g>")
    words = [part for line in [*measures.lines(played), *played.remarks] for part in textwrap.wrap(line, letters)]
    under = bottom + 36
    parts += [f'<text x="{_EDGE}" y="{_n(under + _LINE * k)}">{escape(line)}</text>' for k, line in enumerate(words)]
    return parts, under + _LINE * len(words) + 4 - top


def _device(played: TimedSchedule, row: Sequence[Span], turns: Sequence[int], scale: float, many: bool) -> list[str]:
    """The ops of a device, grouped by kind and stage, and the numbers on them."""
    bars: dict[tuple[Kind, int], list[str]] = defaultdict(list)
    numbers: list[str] = []
    for op, start, end in row:
        x, width = start * scale, (end - start) * scale
        gap = 1 if width > 4 else 0
        bar = f"M{_n(x + gap / 2)} 0h{_n(width - gap)}v{_BAR}h-{_n(width - gap)}z"
        if many:
            bars[op.kind, op.stage].append(bar)
            continue
        name = f"{op}: {measures.short(start)} to {measures.short(end)}, takes {measures.short(end - start)}"
        bars[op.kind, op.stage].append(f'<path d="{bar}"><title>{name}</title></path>')
        if len(str(op.microbatch)) * _LETTER + 4 <= width:
            numbers.append(f'<text x="{_n(x + width / 2)}" y="15">{op.microbatch}</text>')
    parts = []
    for (kind, stage), each in sorted(bars.items()):
        colour = palette.web(palette.shade(kind, turns[stage], played.schedule.shares[stage]))
        inner = f'<path d="{"".join(each)}"/>' if many else "".join(each)
        parts.append(f'<g fill="{colour}">{inner}</g>')
    if numbers:
        parts.append(f'<g fill="#111" text-anchor="middle" pointer-events="none">{"".join(numbers)}</g>')
    return parts


def _legend(played: Sequence[TimedSchedule], top: float) -> list[str]:
    most = max(share for each in played for share in each.schedule.shares)
    parts = []
    x: float = _EDGE
    for kind, meaning in measures.meanings(played).items():
        for turn in range(min(most, 4)):
            colour = palette.web(palette.shade(kind, turn, min(most, 4)))
            parts.append(f'<rect x="{_n(x)}" y="{_n(top)}" width="12" height="12" fill="{colour}"/>')
            x += 12
        words = f"{kind} {meaning}"
        parts.append(f'<text x="{_n(x + 5)}" y="{_n(top + 10)}">{words}</text>')
        x += 5 + _LETTER * len(words) + 14
    if most > 1:
        parts.append(f'<text x="{_n(x)}" y="{_n(top + 10)}">lighter: a later stage of the device</text>')
    return parts


def _n(number: float) -> str:
    """A number of pixels."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
