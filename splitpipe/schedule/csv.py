"""Schedules as torch.distributed.pipelining writes what each rank computes: a line a device, a cell an op, 2F0.

    2F0 forward    7I3 a B, the input gradient    7W3 weight gradients    2B0 a BW, both
"""
from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from os import PathLike, fspath
from typing import Literal

Kind = Literal["F", "B", "W", "BW"]
# Kind, stage and microbatch.
Cell = tuple[Kind, int, int]

# The letters of torch.distributed.pipelining.
LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)


def write(rows: Iterable[Iterable[Cell]], path: str | PathLike[str]) -> None:
    """Writes rows of ops; see ``Schedule.to_csv``."""
    with open(fspath(path), "w", newline="", encoding="utf-8") as file:
        lines = ([f"{stage}{LETTERS[kind]}{microbatch}" for kind, stage, microbatch in row] for row in rows)
        csv.writer(file).writerows(lines)


def read(path: str | PathLike[str]) -> tuple[list[list[Cell]], list[int]]:
    """Rows of ops, and the placement that they say; see ``from_csv``."""
    rows: list[list[Cell]] = []
    placement: dict[int, int] = {}
    try:
        with open(fspath(path), newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no CSV file: {error}. Expected a line a device, cells such as 2F0.") from error
    for device, cells in enumerate(lines):
        rows.append([])
        for number, text in enumerate(map(str.strip, cells)):
            if not text:
                continue
            where = f"{path}, line {device + 1}, cell {number + 1}"
            cell = _cell(text, where)
            if placement.setdefault(cell[1], device) != device:
                raise ValueError(
                    f"{where}: {text!r} is of stage {cell[1]}, which is on line {placement[cell[1]] + 1}: expected "
                    "all ops of a stage on one line, that of its device."
                )
            rows[device].append(cell)
    for stage in range(len(placement)):
        if stage not in placement:
            raise ValueError(f"{path} has no op of stage {stage}: expected stages counted from 0 without a gap.")
    return rows, [placement[stage] for stage in range(len(placement))]


def _cell(text: str, where: str) -> Cell:
    match = _CELL.fullmatch(text)
    if match is None:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(
            f"{where}: {shown!r} is no op: expected stage, letter and microbatch, as in 2F0; the letter is F, I (input "
            "gradient), W (weight gradients) or B (both)."
        )
    stage, letter, microbatch = match.groups()
    return _KINDS[letter], int(stage), int(microbatch)
