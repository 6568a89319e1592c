"""Survivors that have been read: ``explained.txt`` says why no test has to see them."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("explained.txt")


@dataclass(frozen=True)
class Explained:
    """One of them.

    Attributes:
        file: of the package, relative to the repository.
        function: around it; "" outside of all.
        before: the changed lines.
        after: what they have become.
    """

    file: str
    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.function}: {self.before}  ->  {self.after}"


def explained(text: str) -> dict[Explained, str]:
    """Each, and why no test sees it.

    Args:
        text: a line with a file in brackets, then reasons, lines that begin with #, each with the changes below it.

    Raises:
        ValueError: for a line that is none of these, or has no reason or file above it.
    """
    found: dict[Explained, str] = {}
    file, reason, reading = "", "", False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("[") and line.endswith("]"):
            file, reason, reading = line[1:-1], "", False
        elif line.startswith("# "):
            reason, reading = f"{reason} {line[2:]}" if reading else line[2:], True
        elif line.strip():
            function, colon, change = line.partition(": ")
            before, arrow, after = change.partition("  ->  ")
            if not (file and reason and colon and arrow):
                raise ValueError(f"line {number}: expected FUNCTION: BEFORE  ->  AFTER below file and reason: {line}")
            found[Explained(file, function, before, after)], reading = reason, False
    return found
