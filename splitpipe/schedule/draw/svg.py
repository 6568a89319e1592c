"""A picture of a schedule as a self-contained SVG, readable on light and dark backgrounds."""
from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from splitpipe.schedule.draw import measures
from splitpipe.schedule.op import Kind
from splitpipe.schedule.timed import Span, TimedSchedule

_LEFT, _EDGE = 64, 12  # Margins: for the devices' names, and on the other side.
_ROW, _BAR = 28, 22  # The height of a device's row, and of its ops.
_LINE = 16  # The height of a line of text.
_CELL = 24  # The width of the shortest op, if there is room.
_PLOT = (640, 1600)
_LETTER = 6.2
_GREY = "#767676"  # Equally far from white and black.


def draw(timelines: Sequence[TimedSchedule]) -> str:
    """Schedules as one picture, one below the other on the same scale. Hovering over an op shows its name and times."""
    measures.verify(timelines)
    spans = [span for each in timelines for row in each.spans for span in row]
    whole = max(each.makespan for each in timelines)
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=whole)
    plot = min(max(whole / shortest * _CELL, _PLOT[0]), _PLOT[1]) if whole else _PLOT[0]
    scale = plot / whole if whole else 1.0
    width = _LEFT + plot + _EDGE
    parts: list[str] = []
    top = 0.0
    for each in timelines:
        lines, top = _schedule(each, scale, top, int((plot + _LEFT) / _LETTER))
        parts += lines
    parts += _legend(timelines, top)
    height = top + 2 * _LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" font-family="system-ui, sans-serif" font-size="11" fill="{_GREY}">',
        f"<title>{escape('; '.join(map(measures.title, timelines)))}</title>",
        *parts,
        "</svg>",
        "",
    ])


def _schedule(timeline: TimedSchedule, scale: float, top: float, letters: int) -> tuple[list[str], float]:
    """One schedule: its name, its devices, its axis and its measures; and where these end."""
    rows = top + 28
    bottom = rows + _ROW * timeline.schedule.devices
    right = _LEFT + timeline.makespan * scale
    parts = [f'<text x="{_EDGE}" y="{_n(top + 18)}" font-size="13" font-weight="600">'
             f"{escape(measures.title(timeline))}</text>"]
    ticks = measures.ticks(timeline.makespan, most=int(timeline.makespan * scale / 48))
    at = [_n(_LEFT + tick * scale) for tick in ticks]
    lines = "".join(f"M{x} {_n(rows)}V{_n(bottom + 2)}" for x in at)
    parts.append(f'<path d="{lines}" stroke="{_GREY}" stroke-opacity=".35" fill="none"/>')
    parts.append('<g text-anchor="middle">')
    parts += [f'<text x="{x}" y="{_n(bottom + 14)}">{measures.short(tick)}</text>' for x, tick in zip(at, ticks)]
    parts.append("</g>")
    colours = measures.colours(timeline.schedule)
    for device, row in enumerate(timeline.spans):
        y = rows + _ROW * device
        parts.append(f'<g transform="translate({_LEFT} {_n(y + (_ROW - _BAR) / 2)})">')
        parts.append(f'<rect width="{_n(right - _LEFT)}" height="{_BAR}" fill-opacity=".12"/>')
        parts.append(f'<text x="{_EDGE - _LEFT}" y="15">device {device}</text>')
        parts += _device(row, colours, scale)
        parts.append("</g>")
    words = [part for line in [*measures.lines(timeline), *timeline.remarks] for part in textwrap.wrap(line, letters)]
    under = bottom + 36
    parts += [f'<text x="{_EDGE}" y="{_n(under + _LINE * k)}">{escape(line)}</text>' for k, line in enumerate(words)]
    return parts, under + _LINE * len(words) + 4


def _device(row: Sequence[Span], colours: Mapping[tuple[Kind, int], str], scale: float) -> list[str]:
    """The ops of a device, grouped by kind and stage, and the numbers on them."""
    bars: dict[tuple[Kind, int], list[str]] = defaultdict(list)
    numbers: list[str] = []
    for op, start, end in row:
        x, width = start * scale, (end - start) * scale
        gap = 1 if width > 4 else 0
        bar = f"M{_n(x + gap / 2)} 0h{_n(width - gap)}v{_BAR}h-{_n(width - gap)}z"
        name = f"{op}: {measures.short(start)} to {measures.short(end)}, takes {measures.short(end - start)}"
        bars[op.kind, op.stage].append(f'<path d="{bar}"><title>{name}</title></path>')
        if len(str(op.microbatch)) * _LETTER + 4 <= width:
            numbers.append(f'<text x="{_n(x + width / 2)}" y="15">{op.microbatch}</text>')
    parts = [f'<g fill="{colours[key]}">{"".join(each)}</g>' for key, each in sorted(bars.items())]
    if numbers:
        parts.append(f'<g fill="#111" text-anchor="middle" pointer-events="none">{"".join(numbers)}</g>')
    return parts


def _legend(timelines: Sequence[TimedSchedule], top: float) -> list[str]:
    parts = []
    x: float = _EDGE
    for colours, words in measures.legend(timelines):
        for colour in colours:
            parts.append(f'<rect x="{_n(x)}" y="{_n(top)}" width="12" height="12" fill="{colour}"/>')
            x += 12
        parts.append(f'<text x="{_n(x + 5)}" y="{_n(top + 10)}">{words}</text>')
        x += 5 + _LETTER * len(words) + 14
    return parts


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
