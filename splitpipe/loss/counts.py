"""Numbers that Python reads from the batch, or computes from those.

What ``n.item()`` and ``x.shape[0]`` return remembers what it counts when it is multiplied, divided or shifted, so that
a loss divided by n / 2, or multiplied by 1 / n, is traced as a mean. Other functions, such as int(n), round(n) and
len(x), make plain numbers, and so does a float times an int: Python doesn't ask the int.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Row, tensors
from splitpipe.loss.row_numbers import Reading
from splitpipe.loss.terms import RATIO, Divisor, Number, divided

T = TypeVar("T")
Change = Callable[[float], "tuple[Divisor, bool] | None"]


class Count:
    """A number that is a divisor in the microbatch or, if ``inverse``, its inverse."""

    plain: int | float
    divisor: Divisor
    inverse: bool
    reading: Reading

    def __add__(self, other: Any) -> Any:
        return self._with(other, 1) if isinstance(other, Count) else self._made(operator.add, other, self._shifted)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Count):
            return self._with(other, -1)
        return self._made(operator.sub, other, lambda by: self._shifted(-by))

    def __rsub__(self, other: Any) -> Any:
        return (-self).__add__(other)

    def __neg__(self) -> Any:
        return self._made(operator.mul, -1, self._times)

    def __mul__(self, other: Any) -> Any:
        return self._made(operator.mul, other, self._times)

    def __truediv__(self, other: Any) -> Any:
        return self._made(operator.truediv, other, lambda by: self._times(1 / by))

    def __floordiv__(self, other: Any) -> Any:
        whole = type(other) is int and other and not self.plain % other
        return self._made(operator.floordiv, other, lambda by: self._times(1 / by) if whole else None)

    def __rtruediv__(self, other: Any) -> Any:
        return self._made(lambda x, y: y / x, other, self._below)

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        return bool(self._asked())

    def __lt__(self, other: Any) -> Any:
        return self._asked(other) < other

    def __le__(self, other: Any) -> Any:
        return self._asked(other) <= other

    def __gt__(self, other: Any) -> Any:
        return self._asked(other) > other

    def __ge__(self, other: Any) -> Any:
        return self._asked(other) >= other

    def __eq__(self, other: object) -> Any:
        return self._asked() == other

    def __abs__(self) -> Any:
        return self if self.plain >= 0 else -self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self.plain % other

    def __pow__(self, other: Any) -> Any:
        return self._noted(self.plain**other)

    def __round__(self, digits: int | None = None) -> Any:
        return self._noted(round(self.plain, digits))

    def __int__(self) -> int:
        return self._noted(int(self.plain))

    def __float__(self) -> float:
        return self._noted(float(self.plain))

    def __hash__(self) -> int:
        return hash(self.plain)

    def __reduce__(self) -> Any:
        return type(self.plain), (self.plain,)

    def _asked(self, other: object = None) -> Any:
        """The plain number, for a condition: Python may take 1 in its place if it is 0, or an equal ``other``."""
        self.reading.zero = self.reading.zero or not self.plain
        if type(other) in (int, float) and other == self.plain:
            self._noted(other)
        return self.plain

    def _noted(self, value: T) -> T:
        """A plain number that may be used in place of this."""
        if isinstance(value, (int, float)):
            self.reading.plain.add(value)
        return value

    def _shifted(self, by: float) -> tuple[Divisor, bool] | None:
        if self.inverse:
            return None
        if abs(by) > 1 and abs(by) in self.reading.plain:  # Another count; 1 is a constant more often.
            found = None if self.divisor.least is not None else replace(self.divisor, count=self.divisor.count + by)
            return None if found is None else (found, False)
        return self.divisor.shifted(by), False

    def _times(self, by: float) -> tuple[Divisor, bool] | None:
        return self._scaled(1 / by if self.inverse else by, self.inverse) if by else None

    def _below(self, by: float) -> tuple[Divisor, bool] | None:
        return self._scaled(by if self.inverse else 1 / by, not self.inverse) if by else None

    def _scaled(self, by: float, inverse: bool) -> tuple[Divisor, bool] | None:
        return (self.divisor.times(by), inverse) if by > 0 or self.divisor.least is None else None

    def _with(self, other: Count, sign: int) -> Any:
        """The sum or difference of two counts."""
        value = self.plain + sign * other.plain
        one, by = self.divisor, other.divisor
        if self.inverse or other.inverse or self.reading is not other.reading or (one.least, by.least) != (None, None):
            return value
        divisor = Divisor(one.count + sign * by.count, one.more + sign * by.more, source=one.source)
        return _count(self.reading, value, divisor, False)

    def _made(self, function: Callable[[Any, Any], Any], other: Any, change: Change) -> Any:
        if isinstance(other, Count):
            value, read = function(self.plain, other.plain), isinstance(self.divisor.count, Tensor)
            if read is isinstance(other.divisor.count, Tensor):
                return self._noted(value) if function is operator.mul else value
            return _count(self.reading, value, Divisor(float(value), least=value, source=RATIO), False)
        if type(other) not in (int, float):
            return NotImplemented
        value = function(self.plain, other)
        meaning = change(other)
        return value if meaning is None else _count(self.reading, value, *meaning)


class _IntCount(Count, int):  # type: ignore[misc]
    pass


class _FloatCount(Count, float):  # type: ignore[misc]
    pass


def sized(facts: Facts, x: Any, dim: int | None, size: Any) -> Any:
    """A tensor's size along a dimension, or all sizes or elements (None): along its rows, it is a Count."""
    if facts.of(x) is not ROWS or not x.dim():
        return size
    axis = facts.axis(x)
    if isinstance(size, torch.Size):
        return torch.Size([*size[:axis], _size_of(facts, size[axis]), *size[axis + 1 :]])
    return _size_of(facts, size) if dim is None or dim % x.dim() == axis else size


def _size_of(facts: Facts, size: int) -> Any:
    if type(size) is not int:  # In torch's compiler.
        return size
    return _count(facts.reading, size, Divisor(float(size), source="a size"), False)


def counted(facts: Facts, x: object) -> Count | None:
    """The number as one that counts this microbatch's rows: one that another call has kept is a plain one."""
    return x if isinstance(x, Count) and x.reading is facts.reading else None


def uncounted(value: Any) -> Any:
    """A number, or a nesting of some, as code that isn't traced should see it: lists and dicts are changed in place."""
    kind = type(value)
    if kind in (list, dict):
        for key, x in list(value.items() if kind is dict else enumerate(value)):
            plain = uncounted(x)
            if plain is not x:
                value[key] = plain
    elif isinstance(value, tuple):
        found = [*map(uncounted, value)]
        if any(x is not y for x, y in zip(found, value)):
            return torch.Size(found) if kind is torch.Size else tuple.__new__(kind, found)  # It may be a named tuple.
    return value.plain if isinstance(value, Count) else value


def counting(facts: Facts, value: Any, made: object) -> Any:
    """The number that Python has read from a tensor: a Count if the tensor counts rows."""
    if isinstance(made, Row) and type(value) in (int, float):
        return facts.of_rows.read_item(made.row, value)
    divisor = divided(made) if isinstance(made, Number) and type(value) in (int, float) else None
    return value if divisor is None else _count(facts.reading, value, divisor, False)


def _count(reading: Reading, value: int | float, divisor: Divisor, inverse: bool) -> Count:
    count: Count = _IntCount(value) if isinstance(value, int) else _FloatCount(value)
    count.plain, count.divisor, count.inverse, count.reading = value, divisor, inverse, reading
    return count


def note_figures(facts: Facts, values: Iterable[Any], out: Tensor) -> None:
    """Records Python's numbers among a function's arguments that were made after it had read others from the batch.

    Not those that count, which differ between microbatches, nor those of single rows.
    """
    made = facts.of(out)
    if isinstance(made, Row):
        return
    for value in values:
        if isinstance(value, float):
            whole = not value or not math.isfinite(value) or any(map(_is_whole, (value, 1 / value)))
            count = counted(facts, value)
            if not whole and (count is None or count.divisor.source is RATIO) and not facts.is_count(value):
                facts.figures.append(value)
        elif not isinstance(value, Tensor) and out.is_floating_point():
            found = value.tolist() if hasattr(value, "tolist") else value  # NumPy's.
            several = made is CONSTANT if facts.rows > 1 else out.numel() > 1  # Not one for each row.
            if isinstance(found, list) and len(found) == 1 and isinstance(found[0], int):
                continue  # A count, as in torch.tensor([n]).
            if several and isinstance(found, list) and not any(True for _ in tensors(found)):
                facts.figures.append(repr(found))


def _is_whole(value: float) -> bool:
    return math.isclose(value, round(value), rel_tol=1e-6)
