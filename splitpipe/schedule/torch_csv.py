"""Reads schedules from torch.distributed.pipelining's "compute_only" text: a line per device, a cell per op, as 2F0.

    2F0 forward    7I3 B, the input gradient    7W3 W, the weight gradients    2B0 BW, both
"""
from __future__ import annotations

import csv
import re
from os import PathLike, fspath

from splitpipe.schedule.check import check
from splitpipe.schedule.op import LETTERS, Op, Schedule

_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)


def from_csv(path: str | PathLike[str]) -> Schedule:
    """Reads a file from ``Schedule.to_csv``, or from torch.distributed.pipelining's ``_dump_csv`` for "compute_only".

    Args:
        path: the file. It has one line per device, whose cells are ops such as ``2F0``, ``7I3`` (B), ``7W3`` or ``2B0``
            (BW). Empty cells are skipped; a line with only empty cells is a device without ops.

    Raises:
        ValueError: a cell isn't such an op, or its stage is also on another line (the message names line and cell); or
            the schedule can't run, see ``check``.
        TypeError: ``path`` isn't a path.
        OSError: the file can't be read.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as room:
        ...     path = pathlib.Path(room, "schedule.csv")
        ...     Schedule([[Op("F", 0, 0), Op("BW", 0, 0)]], placement=[0]).to_csv(path)
        ...     print(path.read_text().strip(), "is", from_csv(path))
        0F0,0B0 is 0F0 0BW0
    """
    schedule = Schedule(*_read(path))
    try:
        check(schedule)
    except ValueError as error:
        raise ValueError(f"{path}: {error} (In the file, B is written I, and BW is B.)") from error
    return schedule


def _read(path: str | PathLike[str]) -> tuple[list[list[Op]], list[int]]:
    rows: list[list[Op]] = []
    placement: dict[int, int] = {}
    try:
        with open(fspath(path), newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} isn't a CSV file ({error}): expected a line per device, of cells as 2F0.") from error
    for device, cells in enumerate(lines):
        rows.append([])
        for number, text in enumerate(map(str.strip, cells)):
            if not text:
                continue
            where = f"{path}, line {device + 1}, cell {number + 1}"
            op = _op(text, where)
            if placement.setdefault(op.stage, device) != device:
                raise ValueError(f"{where}: expected {text!r} on line {placement[op.stage] + 1}, that of its stage.")
            rows[device].append(op)
    for stage in range(len(placement)):
        if stage not in placement:
            raise ValueError(f"{path} has no op of stage {stage}: expected stages counted from 0 without a gap.")
    return rows, [placement[stage] for stage in range(len(placement))]


def _op(text: str, where: str) -> Op:
    match = _CELL.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{where}: {text[:40]!r} isn't an op: expected stage, letter and microbatch, as in 2F0; the letter is F, I "
            "(input gradient), W (weight gradients) or B (both)."
        )
    stage, letter, microbatch = match.groups()
    return Op(_KINDS[letter], int(stage), int(microbatch))
