"""The parts of a plan that JSON has no form for, written and read."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from splitpipe.schedule.check import check
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Op, Schedule

FORM = 2  # Of what is written: a reader of another one says so.
_OP = re.compile(r"(\d+)(F|BW|B|W)(\d+)", re.ASCII)


def of_schedule(schedule: Schedule) -> dict[str, Any]:
    """A schedule as a dict, its rows in letters."""
    return {
        "name": schedule.name,
        "placement": list(schedule.placement),
        "rows": [" ".join(map(str, row)) for row in schedule.rows],
    }


def schedule_of(text: Mapping[str, Any]) -> Schedule:
    """The schedule that was written."""
    rows = []
    for line in text["rows"]:
        row = []
        for word in line.split():
            match = _OP.fullmatch(word)
            if match is None:
                raise ValueError(f"row {line[:40]!r} has an op that is none: expected ops such as 0F3 and 0BW3.")
            kind: Any = match[2]
            row.append(Op(kind, int(match[1]), int(match[3])))
        rows.append(row)
    made = Schedule(rows, text["placement"], text["name"])
    check(made)
    return made


def costs_of(text: Mapping[str, Any]) -> Costs:
    """The costs that were written."""
    return Costs(**{field.name: text[field.name] for field in fields(Costs)})


def of_sizes(sizes: Sequence[float]) -> list[int | None]:
    """Bytes; null is infinite."""
    return [int(size) if size < math.inf else None for size in sizes]


def sizes_of(text: Sequence[int | None]) -> tuple[float, ...]:
    """The bytes that were written."""
    return tuple(math.inf if size is None else size for size in text)
