"""What Python has read from a microbatch, and from a single row of it: in a loop over images, the boxes in each."""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from splitpipe.loss.terms import few_digits


class Reading:
    """What the code of one microbatch has read, which numbers that count refer to."""

    arrays = False  #: Whether Python has read several values at once, in which it may have found indices.
    zero = False  #: Whether Python may have taken 1 in place of a count of 0: max(n, 1).

    def __init__(self) -> None:
        self.plain: set[float] = set()  #: Counts that don't report their use: len(x), int(n).
        self.joined: set[int] = set()  #: The lengths of batches that were joined: torch.cat([chosen, rejected]).

    def read(self, count: float, plain: bool) -> None:
        """Records a count; if it is ``plain``, it doesn't report its use."""
        if plain:
            self.zero = self.zero or count == 0
            self.plain.add(count)

    def has_part(self, value: float) -> bool:
        """True if a whole number may have been computed from a plain count: what is computed from others is a Count."""
        return any(1 < count < value and not value % count or value == count - 1 > 3 for count in self.plain)


class Positions(NamedTuple):
    """Numbers of rows: the function that made them, how many it made, and whether they are 0, 1, 2, ...

    Without a function, Python has made them, and they may also be other numbers.
    """

    of: weakref.ref[Tensor]
    function: str
    size: int
    plain: bool


class Sizes:
    """The sizes of tensors with ``rows`` rows that Python has read, by which other numbers are recognised."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.shapes: set[tuple[int, ...]] = set()  #: The rows' dimension is the first.
        self.lengths: set[int] = set()

    def has(self, value: float) -> bool:
        """True if a number is the number of rows, or of elements, of a tensor, up to rounding."""
        whole = nearest(value)
        return any(whole in _products(shape) for shape in self.shapes)

    def is_other(self, value: Any) -> bool:
        """True for the size of a dimension without rows."""
        return type(value) in (int, float) and any(value in shape[1:] for shape in self.shapes)

    def may_make(self, value: Any) -> bool:
        """True if a size may be, or make, this number, by which a constant is multiplied or divided.

        An int may be a length, and a float 0.5 * n, or 0.1 / n unless it has few digits. 1 and 2 are constants.
        """
        if type(value) not in (int, float) or not value or not self.shapes:
            return False
        value = abs(value)
        if type(value) is int:
            return value > 2 and value in self.lengths
        if few_digits(value):
            return value > 2 and (self.has(value) or self.has(2 * value))
        return few_digits(value * self._rows) or any(map(self.has, (value, 2 * value, 1 / value)))


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


def nearest(value: float) -> float:
    """A number that is whole up to rounding, as a whole one."""
    found = round(value) if math.isfinite(value) else value
    return float(found) if math.isclose(value, found, rel_tol=1e-6) else value


def numbers(value: Any) -> list[float]:
    """The Python numbers in nestings of tuples, lists and dicts."""
    if isinstance(value, (tuple, list, dict)):
        return [x for each in (value.values() if isinstance(value, dict) else value) for x in numbers(each)]
    return [value] if isinstance(value, (int, float)) and type(value) is not bool else []


def _products(shape: Sequence[int]) -> set[int]:
    """The products of the first dimension with each set of the others."""
    found = {shape[0]}
    for size in shape[1:5]:
        found |= {size * each for each in found}
    return found
