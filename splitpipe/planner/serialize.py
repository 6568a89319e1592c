"""The parts of a plan that JSON has no form for, written and read; and the types of a plan's fields."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from splitpipe.checks import UNCHECKPOINTED_TAIL
from splitpipe.schedule.check import check
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Op, Schedule

FORM = 2  # Of what is written: a reader of another one says so.
_CHECKPOINTS = tuple(UNCHECKPOINTED_TAIL)
Fields = dict[str, tuple[Callable[[Any], bool], str]]
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


def _real(value: object) -> bool:
    return _whole(value) or isinstance(value, float) and value >= 0


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(fits, value))


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


#: The fields of a runner-up: whether a value is right, and what was expected if it is not.
OTHERS: Fields = {
    "way": (_is(str), "a string"),
    "balance": (_all(_whole), "a tuple of ints"),
    "step_time": (lambda value: _real(value) and value < math.inf, "milliseconds"),
    "why": (_is(str), "a string"),
    "peak_bytes": (lambda value: _all(_whole)(value) and len(value) > 0, "a tuple of ints"),
}
#: Those of a plan.
FIELDS: Fields = {
    **{name: field for name, field in OTHERS.items() if name != "why"},
    "devices": (_all(_is(str)), "a tuple of names"),
    "chunks": (_whole, "an int"),
    "checkpoint": (lambda value: isinstance(value, str) and value in _CHECKPOINTS, f"one of {', '.join(_CHECKPOINTS)}"),
    "schedule": (_is(Schedule), "a Schedule"),
    "dropin": (_is(bool), "True or False"),
    "costs": (_is(Costs), "Costs"),
    "memory": (_all(_real), "a tuple of bytes"),
    "layers": (_all(_is(str)), "a tuple of names"),
    "runners_up": (_is(tuple), "a tuple of RunnerUps"),
    "loss_fn": (lambda value: value is None or callable(value), "a function of output and target, or None"),
    "note": (_is(str), "a string"),
}


def verify(plan: object, fields: Fields) -> None:
    """Refuses values of a wrong type."""
    for name, (fits, what) in fields.items():
        value = getattr(plan, name)
        if not fits(value):
            raise TypeError(f"{name} is {value!r}: expected {what}.")
