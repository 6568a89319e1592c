"""Writes and reads a plan's schedule as JSON."""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from splitpipe.schedule.op import Op, Schedule

FORM = 3  # The version of the format, which readers check.
_OP = re.compile(r"(\d+)(F|BW|B|W)(\d+)", re.ASCII)


def of_schedule(schedule: Schedule) -> dict[str, Any]:
    """A schedule as a dict, with its rows as text."""
    return {
        "name": schedule.name, "placement": schedule.placement,
        "rows": [" ".join(map(str, row)) for row in schedule.rows],
    }


def schedule_of(text: Mapping[str, Any]) -> Schedule:
    """The schedule from such a dict."""
    rows = []
    for line in text["rows"]:
        row = []
        for word in line.split():
            match = _OP.fullmatch(word)
            if match is None:
                raise ValueError(f"row {line[:40]!r} has an invalid op: expected ops such as 0F3 and 0BW3.")
            kind: Any = match[2]
            row.append(Op(kind, int(match[1]), int(match[3])))
        rows.append(row)
    return Schedule(rows, text["placement"], text["name"])
