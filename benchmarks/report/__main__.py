"""Fills the tables and numbers of the pages from the results, so that none is typed by hand.

A page marks what is filled by comments, which its reader does not see. FILE is from benchmarks/:

    <!-- table: FILE [TABLE ...] [columns="A | B"] [rows="WORD | COLUMN=VALUE"] [as="COLUMN"] -->
    (the tables of these names, or all of the file, and below them where and when they were measured; with as=, they are
    one table, with a column that has the word behind the comma of their names)
    <!-- end -->

    It takes <!-- value: FILE TABLE COLUMN [rows=...] [pick=most] [format=.1f] -->12.3<!-- end --> ms.

What has a blank in it is quoted. A WORD picks the rows that have it as a cell, or, if there are none, in a cell.
Several words are alternatives, and so are several values of a column; different columns must all fit. A value needs
a single row, or takes the number of ``pick=most`` or ``pick=least``. Its format is one of Python's.

Example:
    python -m benchmarks.report
    python -m benchmarks.report --check
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import cells
from benchmarks.report.cells import Results

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
PAGES = (ROOT / "README.md", BENCHMARKS / "README.md", *sorted((ROOT / "docs").glob("*.md")))

#: What a block may say, beside the names of file, table and column.
OPTIONS = {"table": ("columns", "rows", "as"), "value": ("rows", "pick", "format")}

#: Code on a page may show the marks of a block, and is none.
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL)
START = re.compile(r"<!--\s*(\w+):(.*?)-->", flags=re.DOTALL)
END = re.compile(r"<!--\s*end\s*-->")


@dataclass(frozen=True)
class PageBlock:
    """A place on a page that is filled.

    Attributes:
        kind: "table" or "value".
        names: of the file, and of what is in it.
        options: see ``OPTIONS``.
        start: where in the page's text its content starts.
        end: where that ends.
    """

    kind: str
    names: list[str]
    options: dict[str, str]
    start: int
    end: int


def blocks(text: str) -> Iterator[tuple[int, PageBlock]]:
    """The blocks of a page, each with the line where it starts.

    Raises:
        ValueError: a block has no end, or says what no block says.
    """
    bare = CODE.sub(lambda code: " " * len(code[0]), text)
    for mark in START.finditer(bare):
        end, following = END.search(bare, mark.end()), START.search(bare, mark.end())
        if end is None or (following is not None and following.start() < end.start()):
            raise ValueError(f"found {mark[0]} without an end; expected <!-- end --> behind it")
        pairs = [word.partition("=") for word in shlex.split(mark[2])]
        options = {name: value for name, equals, value in pairs if equals and name.isidentifier()}
        names = ["".join(pair) for pair in pairs if pair[0] not in options]
        known = mark[1] in OPTIONS and {*options} <= {*OPTIONS[mark[1]]}
        if not known or not names or (mark[1] == "value" and len(names) != 3):
            raise ValueError(f"found {mark[0]}; expected a table or a value, see python -m benchmarks.report --help")
        yield text.count("\n", 0, mark.start()) + 1, PageBlock(mark[1], names, options, mark.end(), end.start())


def filled(page: Path, results: Results) -> tuple[str, list[int]]:
    """The text of a page with all its blocks filled, and the lines of those that were not so.

    Raises:
        ValueError: a block is wrong, or asks for what no result has.
    """
    text = page.read_text(encoding="utf-8")
    pieces, old, at = [], [], 0
    for line, it in blocks(text):
        try:
            if it.kind == "table":
                content = cells.tables(it.names, it.options, results, page.parent)
            else:
                content = cells.value(it.names, it.options, results)
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from None
        if content != text[it.start : it.end]:
            old.append(line)
        pieces += [text[at : it.start], content]
        at = it.end
    return "".join([*pieces, text[at:]]), old


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line; the exit code, 1 if a block is wrong or, when checked, not as the results are."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what is not as the results are")
    options = parser.parse_args(arguments)
    results, faults = Results(BENCHMARKS), 0
    for page in PAGES:
        name = page.relative_to(ROOT)
        try:
            text, old = filled(page, results)
        except ValueError as error:
            faults += 1
            print(f"{name}, {error}", file=sys.stderr)
            continue
        if old and options.check:
            faults += 1
            print(f"{name}: not as the results are in lines {old}; run python -m benchmarks.report", file=sys.stderr)
        elif old:
            page.write_text(text, encoding="utf-8")
            print(f"{name}: new in lines {old}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
