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
class Block:
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


def blocks(text: str) -> Iterator[tuple[int, Block | ValueError]]:
    """The blocks of a page, or what is wrong with one, each with the line where it starts."""
    bare = CODE.sub(lambda found: " " * len(found[0]), text)
    for mark in START.finditer(bare):
        line = text.count("\n", 0, mark.start()) + 1
        try:
            yield line, block(bare, mark)
        except ValueError as error:
            yield line, error


def block(text: str, mark: re.Match[str]) -> Block:
    """The block that starts with a mark.

    Raises:
        ValueError: it says what no block says, has no end, or would not be taken for text.
    """
    kind = mark[1]
    if kind not in OPTIONS:
        raise ValueError(f"found a block {kind!r}; expected {' or '.join(OPTIONS)}")
    names, options = [], {}
    for word in shlex.split(mark[2]):
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            options[name] = value
        else:
            names.append(word)
    for name in options:
        if name not in OPTIONS[kind]:
            raise ValueError(f"found the option {name!r}; expected, for a {kind}: {', '.join(OPTIONS[kind])}")
    if not names or (kind == "value" and len(names) != 3):
        expected = {"table": "FILE and tables", "value": "FILE, TABLE and COLUMN"}[kind]
        raise ValueError(f"found the names {names}; expected, for a {kind}: {expected}; quote those with blanks")
    end, following = END.search(text, mark.end()), START.search(text, mark.end())
    if end is None or (following is not None and following.start() < end.start()):
        raise ValueError(f"found a {kind} without an end; expected <!-- end --> behind it")
    before = text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()]
    if kind == "value" and not before.strip(" \t>*+-"):
        raise ValueError("found a value at the start of a line, which Markdown takes for HTML; put a word before it")
    return Block(kind, names, options, mark.end(), end.start())


def filled(page: Path, results: Results) -> tuple[str, list[str], list[str]]:
    """The text of a page with all its blocks filled; which of them were not so; and what is wrong with others."""
    text = page.read_text(encoding="utf-8")
    pieces, old, wrong, at = [], [], [], 0
    for line, it in blocks(text):
        where = f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}:{line}"
        try:
            if isinstance(it, ValueError):
                raise it
            if it.kind == "table":
                content = cells.tables(it.names, it.options, results, page.parent)
            else:
                content = cells.value(it.names, it.options, results)
        except ValueError as error:
            wrong.append(f"{where}: {error}")
            continue
        if content != text[it.start : it.end]:
            old.append(f"{where}: found another {it.kind} than {it.names[0]} gives; run python -m benchmarks.report")
        pieces += [text[at : it.start], content]
        at = it.end
    return "".join([*pieces, text[at:]]), old, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line; the exit code, 1 if a block is wrong or, when checked, not as the results are."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="to fill (both README.md and docs/)")
    parser.add_argument("--check", action="store_true", help="write nothing; say what is not as the results are")
    options = parser.parse_args(arguments)
    results = Results(BENCHMARKS)
    found = {page: filled(page.resolve(), results) for page in options.pages}
    faults = [fault for _, old, wrong in found.values() for fault in (*wrong, *(old if options.check else ()))]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    if not options.check:
        for page, (text, old, wrong) in found.items():
            if old:
                page.write_text(text, encoding="utf-8")
            print(f"{page}: {len(old)} blocks new, {len(wrong)} left as they are")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
