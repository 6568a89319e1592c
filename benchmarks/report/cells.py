"""Tables for the blocks of a page, and numbers out of them, from the files of results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import measure
from benchmarks.harness.measure import Row

#: Takes one number of several.
PICKS = {"most": max, "least": min}


@dataclass(frozen=True)
class Results:
    """Files of results.

    Attributes:
        folder: that their names start from.
    """

    folder: Path

    def file(self, name: str) -> Mapping[str, Any]:
        """Environment and tables of a file."""
        path = self.folder / name
        if not path.is_file():
            raise unknown("file", name, sorted(f"results/{each.name}" for each in self.folder.glob("results/*.json")))
        return _read(path)

    def table(self, file: str, name: str) -> Sequence[Row]:
        """Its rows."""
        tables: Mapping[str, Sequence[Row]] = self.file(file)["tables"]
        if name not in tables:
            raise unknown(f"table of {file}", name, tables)
        return tables[name]


@cache
def _read(path: Path) -> Mapping[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def unknown(what: str, name: str, there: Iterable[object]) -> ValueError:
    """The error for a name that is not there."""
    return ValueError(f"found the {what} {name!r}; expected one of: {'; '.join(map(str, there))}")


def shown(value: object) -> str:
    """A cell as in the tables.

    Example:
        >>> shown(0.98765), shown("zb-h1")
        ('0.988', 'zb-h1')
    """
    return measure.table([{"": value}]).splitlines()[-1].removeprefix("| ").removesuffix(" |")


def reads(cell: object, text: str) -> bool:
    """Says if a cell is what a page says, as in the tables or in few digits.

    Example:
        >>> reads(5.0, "5.000"), reads(5.0, "5"), reads(5.0, "5.1")
        (True, True, False)
    """
    return text == shown(cell) or (isinstance(cell, float) and text == f"{cell:g}")


def listed(text: str) -> list[str]:
    """The words between bars."""
    return [each.strip() for each in text.split("|")]


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The names of all columns, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row))


def picked(rows: Sequence[Row], wanted: str) -> list[Row]:
    """The rows that are meant.

    Args:
        rows: of a table.
        wanted: words, and columns with a value, with bars between them; see the top of this file.

    Raises:
        ValueError: there is no such row.

    Example:
        >>> rows = [{"name": "a", "size": 1}, {"name": "a", "size": 2}, {"name": "a, later", "size": 1}]
        >>> picked(rows, "a | size=1")
        [{'name': 'a', 'size': 1}]
        >>> picked(rows, "later")
        [{'name': 'a, later', 'size': 1}]
    """
    words: list[str] = []
    values: dict[str, list[str]] = {}
    columns = columns_of(rows)
    for each in listed(wanted):
        column, equals, value = each.partition("=")
        if equals and column in columns:
            values.setdefault(column, []).append(value)
        else:
            words.append(each)
    chosen = list(rows)
    for column, those in values.items():
        for value in those:
            if not any(reads(row.get(column, ""), value) for row in rows):
                raise unknown(f"value of {column!r}", value, dict.fromkeys(shown(row.get(column, "")) for row in rows))
        chosen = [row for row in chosen if any(reads(row.get(column, ""), value) for value in those)]
    if words:
        fitting = [row for word in words for row in having(rows, word)]
        chosen = [row for row in chosen if row in fitting]
    if not chosen:
        raise ValueError(f"found no row that fits rows={wanted!r}; expected one: ask for less at a time")
    return chosen


def having(rows: Sequence[Row], word: str) -> list[Row]:
    """The rows that have a word as a cell, or in a cell."""
    whole = [row for row in rows if any(reads(cell, word) for cell in row.values())]
    fitting = whole or [row for row in rows if any(word in cell for cell in row.values() if isinstance(cell, str))]
    if not fitting:
        raise unknown("row", word, dict.fromkeys(shown(next(iter(row.values()), "")) for row in rows))
    return fitting


def tables(names: Sequence[str], options: Mapping[str, str], results: Results, folder: Path) -> str:
    """The content of a block of tables.

    Args:
        names: of the file, and of the tables if it is not to be all of them.
        options: "columns", "rows" and "as".
        results: where it is from.
        folder: where the page lies.

    Raises:
        ValueError: there is no such file, table, column or row.
    """
    file, *names = names
    names = names or list(results.file(file)["tables"])
    selection = {name: selected(results.table(file, name), options) for name in names}
    if "as" in options:  # What stands behind the comma of their names.
        model = options["as"]
        selection = {"": [{model: name.rpartition(", ")[2], **row} for name in names for row in selection[name]]}
    parts = []
    for name, rows in selection.items():
        parts += [f"**{name}**"] if len(selection) > 1 else []
        parts.append(measure.table(rows))
    path = Path(os.path.relpath(results.folder / file, folder)).as_posix()
    return "\n" + "\n\n".join([*parts, origin(results.file(file)["environment"], path)]) + "\n"


def selected(rows: Sequence[Row], options: Mapping[str, str]) -> Sequence[Row]:
    """The rows and columns that are asked for."""
    if "rows" in options:
        rows = picked(rows, options["rows"])
    if "columns" in options:
        rows = [{column: cell(row, column, rows) for column in listed(options["columns"])} for row in rows]
    return rows


def cell(row: Row, column: str, rows: Sequence[Row]) -> object:
    """A row's cell, empty where other rows alone have one."""
    if column not in row and column not in (there := columns_of(rows)):
        raise unknown("column", column, there)
    return row.get(column, "")


def origin(environment: Mapping[str, Any], path: str) -> str:
    """Where and when tables were measured, in a line."""
    return f"<sub>{machine(environment)}; [{Path(path).name}]({path})</sub>"


def machine(environment: Mapping[str, Any]) -> str:
    """Where and when, and by which versions.

    Example:
        >>> machine({"cpu": "A chip", "cores": 2, "python": "3.11", "torch": "2.13.0", "date": "2026-11-21 10:00:00"})
        'A chip, 2 cores, Python 3.11, torch 2.13.0, 2026-11-21'
    """
    said = [environment["gpu"]] if "gpu" in environment else []
    said += [f"{environment['cpu']}, {environment['cores']} cores", f"Python {environment['python']}"]
    said += [f"{name} {environment[name]}" for name in ("torch", "torchgpipe") if name in environment]
    return ", ".join([*said, environment["date"][:10]])


def value(names: Sequence[str], options: Mapping[str, str], results: Results) -> str:
    """The content of a block of one value.

    Args:
        names: of file, table and column.
        options: "rows", "pick" and "format".
        results: where it is from.

    Raises:
        ValueError: there is no such file, table, column or row, more than one, or no number where one must be.
    """
    file, name, column = names
    rows = results.table(file, name)
    rows = picked(rows, options["rows"]) if "rows" in options else rows
    cells = [each for row in rows if (each := cell(row, column, rows)) != ""]
    pick = options.get("pick")
    if pick is not None:
        if pick not in PICKS:
            raise unknown("pick", pick, PICKS)
        cells = [PICKS[pick](number(each) for each in cells)]
    if len(cells) != 1:
        raise ValueError(f"found {len(cells)} cells; expected one: say more in rows=, or pick=most or pick=least")
    return format(number(cells[0]), options["format"]) if "format" in options else shown(cells[0])


def number(cell: Any) -> float:
    """The number in a cell."""
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"found the cell {cell!r}; expected a number, since it is picked or has a format") from None
