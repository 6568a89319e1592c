"""Schedules: a row of ops for each device, and the device of each stage.

    F    forward                        needs F of the stage before
    B    gradient of the input          needs F of the same stage, and the backward of the stage after
    W    gradients of the weights       needs B
    BW   both together

A stage's input gradient exists when its B or its BW is done: for ops that wait for it, both count as B.
"""
from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import index
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]
#: The letters of torch.distributed.pipelining.
LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
#: By how much an op changes the number of activations that are alive: F takes one, W and BW release it.
CHANGES: dict[Kind, int] = {"F": 1, "B": 0, "W": -1, "BW": -1}


class Op(NamedTuple):
    """F, B, W, or B and W together (BW), of one microbatch on one stage.

    Attributes:
        kind: "F", "B", "W" or "BW".
        stage: counted from 0, in the model's order.
        microbatch: counted from 0.

    Example:
        >>> print(Op("F", 2, 0))
        2F0
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order in which each device runs its ops. It has no times: see ``simulate``.

    Args:
        rows: the ops of each device, in order.
        placement: the device of each stage.
        name: for pictures and messages. Schedules that differ only in their names are equal.

    Raises:
        TypeError: ``rows`` isn't a list of lists of Ops, ``placement`` isn't a list of ints, or ``name`` isn't a
            string. (``check`` verifies that the schedule can run.)

    Example:
        >>> one = Schedule([[Op("F", 0, 0), Op("BW", 0, 0)]], placement=[0])
        >>> one.devices, one.stages, one.microbatches
        (1, 1, 1)
        >>> print(one)
        0F0 0BW0
    """

    rows: tuple[tuple[Op, ...], ...]
    placement: tuple[int, ...]
    name: str = field(default="", compare=False)

    def __init__(self, rows: Iterable[Iterable[Op]], placement: Iterable[int], name: str = "") -> None:
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}: expected a string.")
        object.__setattr__(self, "rows", _rows(rows))
        object.__setattr__(self, "placement", as_placement(placement))
        object.__setattr__(self, "name", name)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max((op.microbatch for row in self.rows for op in row), default=-1)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """For each stage, the number of stages on its device."""
        counts = Counter(self.placement)
        return tuple(counts[device] for device in self.placement)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """For each device, the most activations that are alive at once, those of each stage counted."""
        return tuple(max(accumulate(CHANGES[op.kind] for op in row), default=0) for row in self.rows)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """The same, where 1 is those of one microbatch on all stages of the device."""
        return tuple(peak / max(1, self.placement.count(device)) for device, peak in enumerate(self.peaks))

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Writes the rows in torch.distributed.pipelining's text format for what each rank computes.

        Args:
            path: the file. It has one line per device, whose cells are stage, letter and microbatch: ``2F0``, ``7I3``
                for a B, ``7W3``, ``2B0`` for a BW. ``_PipelineScheduleRuntime._load_csv(path, "compute_only")`` reads
                it.

        Raises:
            TypeError: ``path`` isn't a path.
            OSError: the file can't be written.
        """
        with open(fspath(path), "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(map(torch_name, row) for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def torch_name(op: Op) -> str:
    return f"{op.stage}{LETTERS[op.kind]}{op.microbatch}"


def listed(value: object) -> list[Any] | None:
    """The values that an argument lists, in their order; None if it isn't any kind of list."""
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or not isinstance(value, Iterable):
        return None
    return list(value) if getattr(value, "ndim", None) != 0 else None  # An array without dimensions is a number.


def counted(number: int, what: str) -> str:
    """A number with its noun, for messages: 1 stage, 2 stages, 3 microbatches."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def as_placement(placement: object) -> tuple[int, ...]:
    devices = listed(placement)
    if devices is None or not all(hasattr(device, "__index__") and not isinstance(device, bool) for device in devices):
        raise TypeError(f"placement is {placement!r}: expected a list of ints, the device of each stage.")
    return tuple(map(index, devices))


def _rows(rows: object) -> tuple[tuple[Op, ...], ...]:
    lists = None if isinstance(rows, Op) else listed(rows)
    ops = [None if isinstance(row, Op) else listed(row) for row in lists or ()]
    if lists is None or None in ops:
        raise TypeError(f"rows is {rows!r}: expected a list with one row of Ops per device.")
    return tuple(tuple(map(_op, row)) for row in ops if row is not None)


def _op(value: Any) -> Op:
    if isinstance(value, (tuple, list)) and len(value) == 3:
        kind, stage, microbatch = value
        if isinstance(kind, str) and type(stage) is int and type(microbatch) is int:
            return value if isinstance(value, Op) else Op(*value)
    raise TypeError(f"rows has {value!r}: expected Ops of a kind, a stage and a microbatch, such as Op('F', 2, 0).")


def verify(schedule: object) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is {schedule!r}: expected a Schedule, such as schedule.build('1f1b', 4, 8).")


def dependencies(op: Op, stages: int) -> tuple[Op, ...]:
    """The ops that an op waits for, that of the same stage first."""
    kind, stage, microbatch = op
    if kind == "F":
        return (Op("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Op("B", stage, microbatch),)
    own = Op("F", stage, microbatch)
    return (own, Op("B", stage + 1, microbatch)) if stage + 1 < stages else (own,)


def source_of(op: Op) -> Op:
    """The op that others wait for when they wait for this one: for a BW, the B that it includes."""
    return Op("B", op.stage, op.microbatch) if op.kind == "BW" else op
