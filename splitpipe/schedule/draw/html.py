"""A zoomable page that shows schedules one below the other: a single file, which needs no network."""
from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from operator import itemgetter
from string import Template
from typing import Any

from splitpipe.schedule.draw import measures
from splitpipe.schedule.timed import TimedSchedule


def draw(timelines: Sequence[TimedSchedule]) -> str:
    """Schedules as an HTML page, all on one time axis: measures, ops by device, and what is alive there."""
    measures.verify(timelines)
    room = files("splitpipe.schedule.draw")
    page, style, script = (
        room.joinpath(f"page.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js")
    )
    kinds, meanings = zip(*measures.MEANING.items())
    schedules = [_data(each) for each in timelines]
    data = json.dumps({"kinds": kinds, "meanings": meanings, "schedules": schedules}, separators=(",", ":"))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    return Template(page).substitute(
        policy=policy,
        title=escape(", ".join(map(measures.name, timelines))),
        style=style,
        script=script,
        legend=_legend(timelines),
        table=_table(timelines),
        remarks="".join(f"<p>{escape(remark)}</p>" for each in timelines for remark in each.remarks),
        # In a script element, whatever texts it contains: they mustn't end it.
        data=data.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"),
    )


def _hash(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


def _data(timeline: TimedSchedule) -> dict[str, Any]:
    """The data for the script. An op is five numbers in a row: kind, stage, microbatch, start, end."""
    stages, devices = range(timeline.schedule.stages), range(timeline.schedule.devices)
    kinds, colours = [*measures.MEANING], measures.colours(timeline.schedule)
    ops = [[(kinds.index(op.kind), op.stage, op.microbatch, start, end) for op, start, end in row]
           for row in timeline.spans]
    return {
        "title": measures.title(timeline),
        "summary": "; ".join(measures.lines(timeline)),
        "makespan": timeline.makespan,
        "idle": measures.idle(timeline),
        "colours": [[colours[kind, stage] for stage in stages] for kind in kinds],
        "rows": [_flat(row) for row in ops],
        "activations": [_flat(measures.alive(timeline, device)) for device in devices],
    }


def _flat(points: Sequence[tuple[float, ...]]) -> list[float]:
    return [number for point in points for number in point]


def _legend(timelines: Sequence[TimedSchedule]) -> str:
    items = []
    for colours, words in measures.legend(timelines):
        bars = "".join(f'<rect x="{12 * k}" width="12" height="12" fill="{c}"/>' for k, c in enumerate(colours))
        items.append(f'<svg width="{12 * len(colours)}" height="12" aria-hidden="true">{bars}</svg> {words}')
    return "".join(f"<li>{item}</li>" for item in items)


def _table(timelines: Sequence[TimedSchedule]) -> str:
    """The measures, one line per schedule; the shortest makespan of several is highlighted."""
    texts = [measures.texts(each) for each in timelines]
    least = min(each.makespan for each in timelines)
    lines = [_row("th", ["schedule", *texts[0], "lower bound"])]
    for each, text in zip(timelines, texts):
        reason, bound = max(each.bounds.items(), key=itemgetter(1))
        cells = [measures.name(each), *text.values(), f"{measures.short(bound)} ({reason})"]
        lines.append(_row("td", cells, ' class="best"' if len(timelines) > 1 and each.makespan <= least else ""))
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
