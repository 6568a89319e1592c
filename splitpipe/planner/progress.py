"""The progress bar: one line on the terminal, gone when the block ends."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

#: Called with how many are done, of how many, and what comes next.
Progress = Callable[[int, int, str], None]

_WIDTH = 12


@contextmanager
def bar(shown: bool | None = None, file: TextIO | None = None) -> Iterator[Progress]:
    """Gives what shows how far a measurement has come.

    Args:
        shown: whether to show it; None: if the file is a terminal.
        file: to write to; None: standard error.

    Example:
        >>> with bar(False) as progress:
        ...     progress(0, 2, "layer 0 (Linear), 8 chunks, cuda:0")
    """
    out = sys.stderr if file is None else file
    if shown is None:
        shown = out is not None and out.isatty()
    if not shown or out is None:
        yield lambda done, total, what: None
        return
    longest = 0

    def show(done: int, total: int, what: str) -> None:
        nonlocal longest
        full = _WIDTH * done // total if total else _WIDTH
        line = f"profiling [{'#' * full}{'-' * (_WIDTH - full)}] {done}/{total} {what}"
        longest = max(longest, len(line))
        out.write("\r" + line.ljust(longest))
        out.flush()

    try:
        yield show
    finally:
        if longest:
            out.write("\r" + " " * longest + "\r")
            out.flush()
