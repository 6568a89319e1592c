"""A zoomable page that shows schedules one below the other: a single file, which needs no network."""
from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from splitpipe.schedule.draw import measures, palette
from splitpipe.schedule.op import Kind
from splitpipe.schedule.timed import TimedSchedule

_KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")


def draw(played: Sequence[TimedSchedule]) -> str:
    """Schedules as an HTML page, all on one time axis: measures, ops by device, and what is alive there."""
    measures.verify(played)
    room = files("splitpipe.schedule.draw")
    page, style, script = (
        room.joinpath(f"page.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js")
    )
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    return Template(page).substitute(
        policy=policy,
        title=escape(", ".join(map(measures.name, played))),
        style=style,
        script=script,
        legend=_legend(played),
        table=_table(played),
        remarks="".join(f"<p>{escape(remark)}</p>" for each in played for remark in each.remarks),
        choice="" if any(each.bytes for each in played) else "hidden",
        data=_json({
            "kinds": _KINDS,
            "meanings": [palette.MEANING[kind] for kind in _KINDS],
            "schedules": [_data(each) for each in played],
        }),
    )


def _hash(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """JSON that doesn't end a script element, whatever texts it contains."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _data(played: TimedSchedule) -> dict[str, Any]:
    """The data for the script. An op is five numbers in a row: kind, stage, microbatch, start, end."""
    schedule = played.schedule
    turns = palette.turns(schedule.placement)
    colours = [
        [palette.web(palette.shade(kind, turn, share)) for turn, share in zip(turns, schedule.shares)]
        for kind in _KINDS
    ]
    rows = [
        [number for (kind, stage, k), start, end in row for number in (_KINDS.index(kind), stage, k, start, end)]
        for row in played.spans
    ]
    devices = range(schedule.devices)
    return {
        "title": measures.title(played),
        "summary": "; ".join(measures.lines(played)),
        "makespan": played.makespan,
        "idle": measures.idle(played),
        "colours": colours,
        "rows": rows,
        "activations": [_flat(measures.alive(played, device)) for device in devices],
        "bytes": None if played.bytes is None else [
            _flat(measures.steps(played.curve(device, played.bytes))) for device in devices
        ],
    }


def _flat(curve: Sequence[tuple[float, float]]) -> list[float]:
    return [number for point in curve for number in point]


def _legend(played: Sequence[TimedSchedule]) -> str:
    most = min(4, max(share for each in played for share in each.schedule.shares))
    items = []
    for kind, meaning in measures.meanings(played).items():
        colours = [palette.web(palette.shade(kind, turn, most)) for turn in range(most)]
        bars = "".join(f'<rect x="{12 * k}" width="12" height="12" fill="{c}"/>' for k, c in enumerate(colours))
        items.append(f'<svg width="{12 * most}" height="12" aria-hidden="true">{bars}</svg> {kind} {meaning}')
    if most > 1:
        items.append("lighter: a later stage of the device")
    return "".join(f"<li>{item}</li>" for item in items)


def _table(played: Sequence[TimedSchedule]) -> str:
    """The measures, one line per schedule; the shortest makespan of several is highlighted."""
    with_bytes = any(each.bytes for each in played)
    head = ["schedule", "devices", "microbatches", "makespan", "bubble", "longest", "its bubble", "idle",
            "peak activations", *["peak bytes"] * with_bytes, "lower bound"]
    least = min(each.makespan for each in played)
    lines = [_row("th", head)]
    for each in played:
        name, bound = max(each.bounds.items(), key=lambda item: item[1])
        cells = [
            measures.name(each), str(each.schedule.devices), str(each.schedule.microbatches),
            measures.short(each.makespan), measures.percent(each.bubble),
            measures.short(each.longest), measures.percent(each.bubble_longest),
            measures.each_device(measures.idle(each)), measures.each_device(each.peak_activations),
            *[measures.size(max(each.peak_bytes)) if each.peak_bytes else ""] * with_bytes,
            f"{measures.short(bound)} ({name})",
        ]
        best = len(played) > 1 and each.makespan <= least
        lines.append(_row("td", cells, ' class="best"' if best else ""))
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
