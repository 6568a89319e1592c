"""What Python has read from a microbatch, and from a single row of it: in a loop over images, the boxes in each."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Reading:
    """What the code of one microbatch has read, which numbers that count refer to."""

    zero = False  #: Whether Python may have taken 1 in place of a count of 0: max(n, 1).

    def __init__(self) -> None:
        self.plain: set[float] = set()  #: Counts that don't report their use: len(x), int(n).

    def read(self, count: float, plain: bool) -> None:
        """Records a count; if it is ``plain``, it doesn't report its use."""
        if plain:
            self.zero = self.zero or count == 0
            self.plain.add(count)


class RowNumber:
    """What ``n.item()`` returns for a row's n. What is computed from it, and a copy of it, is a plain number."""

    plain: int | float
    row: int

    def __reduce__(self) -> Any:
        return type(self.plain), (self.plain,)


class _RowInt(RowNumber, int):
    pass


class _RowFloat(RowNumber, float):
    pass


class RowNumbers:
    """By row, what Python has read from it, or takes in place of that: max(n, 1).

    Numbers of other types are recognised by value, unless they equal the number of rows.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._of: dict[int, set[float]] = {}

    def read(self, row: int, values: Iterable[float]) -> None:
        """Records numbers that were read from a row. If it is the only one, 1 may be the number of rows instead."""
        found = [1.0 if value == 0 else float(value) for value in values]
        self._of.setdefault(row, set()).update(x for x in found if self._rows > 1 or x != 1)

    def read_item(self, row: int, value: int | float) -> int | float:
        """The number that ``item()`` has read from a row, which knows the row."""
        found: Any = _RowInt(value) if isinstance(value, int) else _RowFloat(value)
        found.plain, found.row = value, row
        return found  # type: ignore[no-any-return]

    def taken(self, row: int, value: float) -> None:
        """Records a number that Python takes in place of a row's, which is less."""
        self._of.setdefault(row, set()).add(float(value))

    def has(self, row: int, value: float) -> bool:
        """True if a number is one of a row's."""
        if isinstance(value, RowNumber):
            return value.row == row
        return (self._rows == 1 or value != self._rows) and value in self._of.get(row, ())
