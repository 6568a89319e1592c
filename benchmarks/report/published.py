"""torchgpipe's published results, read from the pages of its repository: other machines, other versions of torch.

Example:
    git clone https://github.com/kakaobrain/torchgpipe && python -m benchmarks.report.published torchgpipe
"""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import measure
from benchmarks.harness.measure import Row

RESULTS = Path(__file__).resolve().parents[1] / "results"

#: The page of each benchmark, by the name of our table.
PAGES = {
    "U-Net speed": "unet-speed",
    "AmoebaNet-D speed": "amoebanetd-speed",
    "ResNet-101 speed": "resnet101-speed",
    "U-Net memory": "unet-memory",
    "AmoebaNet-D memory": "amoebanetd-memory",
    "U-Net timeline": "unet-timeline",
    "ResNet-101 accuracy": "resnet101-accuracy",
}

#: What a number may be followed by, and what the column says then.
UNITS = {"/s": "samples a second", " samples/sec": "samples a second", "×": "times", " GiB": "GiB", "%": "%"}

#: In place of a number.
NONE = ("", "N/A", "Out of memory")


@dataclass(frozen=True)
class Page:
    """The results on a page of a benchmark.

    Attributes:
        title: of the page.
        rows: of its table.
        measured_on: machine and versions, a line each.
    """

    title: str
    rows: list[Row]
    measured_on: list[str]


def page(text: str) -> Page:
    """Reads the README of a benchmark: a table below "Result", a list below "Optimized Environment".

    Raises:
        ValueError: there is no such table or list.

    Example:
        >>> found = page("# S\\n## Result\\nRun | Rate\\n--- | ---:\\na | 1.50/s\\n# Optimized Environment\\n- P40\\n")
        >>> found.rows, found.measured_on
        ([{'Run': 'a', 'Rate, samples a second': '1.50'}], ['P40'])
    """
    title, *sections = re.split(r"^#+ (?=.)", text, flags=re.MULTILINE)[1:]
    parts = {head.strip(): body for head, _, body in (section.partition("\n") for section in sections)}
    result = parts.get("Result", "")
    rows = across(result) if "<table>" in result else with_units(piped(result))
    measured_on = re.findall(r"^- (.+)$", parts.get("Optimized Environment", ""), flags=re.MULTILINE)
    if not rows or not measured_on:
        raise ValueError(
            f"found the sections {', '.join(parts)}; expected a table below 'Result' and a list below 'Optimized "
            "Environment': is this torchgpipe's README of a benchmark?"
        )
    return Page(title.partition("\n")[0].strip(), rows, measured_on)


def piped(text: str) -> list[dict[str, str]]:
    """The rows of a table with bars between its cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if " | " in line]
    columns, *rows = [line for line in lines if not all(re.fullmatch(r":?-+:?", cell) for cell in line)] or [[]]
    return [dict(zip(columns, (re.sub(r"\[(.*?)\]\[\]", r"\1", cell) for cell in row), strict=True)) for row in rows]


def across(text: str) -> list[Row]:
    """The rows of a table in HTML whose columns are the experiments, for each "by" that has lines of its own.

    Example:
        >>> lines = "<th>Run</th><td>a</td>", "<th>Size</th><td> 1</td>", "<th>us</th>", "<th>Time</th><td>2 s</td>"
        >>> across("".join(f"<tr>{line}</tr>" for line in lines))
        [{'Run': 'a', 'Size': '1', 'by': 'us', 'Time': '2 s'}]
    """
    lines = [
        [html.unescape(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, flags=re.DOTALL)]
        for line in re.findall(r"<tr>(.*?)</tr>", text, flags=re.DOTALL)
    ]
    (kind, *names), *lines = lines
    shared: list[Row] = [{kind: name} for name in names]
    rows: list[Row] = []
    for head, *cells in lines:
        if not cells:
            rows += [{**row, "by": head} for row in shared]
        for row, cell in zip(rows[-len(names) :] or shared, cells):
            row[head] = cell
    return rows


def with_units(rows: Sequence[Mapping[str, str]]) -> list[Row]:
    """The same rows, but that a column of numbers with one unit has it in its name. Digits stay those on the page.

    Example:
        >>> with_units([{"memory": "20.30 GiB"}, {"memory": "N/A"}])
        [{'memory, GiB': '20.30'}, {'memory, GiB': 'N/A'}]
    """
    found: list[Row] = [{} for _ in rows]
    for column in rows[0] if rows else ():
        cells = [row[column] for row in rows]
        numbers = [re.fullmatch(r"([\d.]+)(\D*)", cell) for cell in cells if cell not in NONE]
        units = {UNITS.get(number[2]) if number else None for number in numbers}
        (unit,) = units if len(units) == 1 else (None,)
        for row, cell in zip(found, cells):
            number = re.match(r"[\d.]+", cell)
            row[f"{column}, {unit}" if unit else column] = number[0] if unit and number else cell
    return found


def read(repository: str) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Where the results are from, and the tables.

    Args:
        repository: path of a clone of torchgpipe's.

    Raises:
        ValueError: it is none, or its pages are not as expected.
    """

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", repository, *command], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"found {repository}, where git {command[0]} says {done.stderr.strip()!r}; expected a clone of "
                "torchgpipe's repository: git clone https://github.com/kakaobrain/torchgpipe"
            )
        return done.stdout

    sources: dict[str, Row] = {}
    tables: dict[str, list[Row]] = {}
    for name, folder in PAGES.items():
        path = f"benchmarks/{folder}/README.md"
        found = page(git("show", f"HEAD:{path}"))
        sources[name] = {"file": path, "title": found.title, "measured_on": found.measured_on}
        tables[name] = found.rows
    commit, date = git("log", "-1", "--format=%H %cs").split()
    where = {"repository": "https://github.com/kakaobrain/torchgpipe", "commit": commit, "date": date}
    return {"published": {**where, "sources": sources}}, tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        "published.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", help="path of a clone of torchgpipe")
    parser.add_argument("--save", metavar="FILE", default=str(RESULTS / "published.json"), help="where the tables go")
    options = parser.parse_args(arguments)
    try:
        where, tables = read(options.repository)
    except ValueError as error:
        print(f"published.py: {error}", file=sys.stderr)
        return 2
    for title, rows in tables.items():
        print(f"\n{title}\n\n{measure.table(rows)}")
    measure.save(options.save, where, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
