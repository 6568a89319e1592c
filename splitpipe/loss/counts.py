"""Python numbers that count rows: what ``n.item()`` returns while a microbatch's code is traced.

They remember what they count when they are multiplied, divided or shifted, so that a loss divided by n / 2, or
multiplied by 1 / n, is traced as a mean. Other functions, such as int(n) and round(n), make plain numbers of them.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

from splitpipe.loss.facts import Facts
from splitpipe.loss.terms import Divisor, Number, divided

Change = Callable[[float], "tuple[Divisor, bool] | None"]


class Count:
    """A number that is a divisor in the microbatch or, if ``inverse``, its inverse."""

    plain: int | float
    divisor: Divisor
    inverse: bool
    facts: weakref.ref[Facts]

    def __add__(self, other: Any) -> Any:
        return self._made(operator.add, other, self._shifted)

    def __sub__(self, other: Any) -> Any:
        return self._made(operator.sub, other, lambda by: self._shifted(-by))

    def __mul__(self, other: Any) -> Any:
        return self._made(operator.mul, other, self._times)

    def __truediv__(self, other: Any) -> Any:
        return self._made(operator.truediv, other, lambda by: self._times(1 / by))

    def __rtruediv__(self, other: Any) -> Any:
        return self._made(lambda x, y: y / x, other, self._below)

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        return bool(self._asked())

    def __lt__(self, other: Any) -> bool:
        return bool(self._asked() < other)

    def __le__(self, other: Any) -> bool:
        return bool(self._asked() <= other)

    def __gt__(self, other: Any) -> bool:
        return bool(self._asked() > other)

    def __ge__(self, other: Any) -> bool:
        return bool(self._asked() >= other)

    def __eq__(self, other: object) -> bool:
        return bool(self._asked() == other)

    def __hash__(self) -> int:
        return hash(self.plain)

    def __reduce__(self) -> Any:
        return type(self.plain), (self.plain,)

    def _asked(self) -> Any:
        """The plain number, for a condition: if it is 0, Python may take 1 in its place."""
        facts = self.facts()
        if facts is not None and not self.plain:
            facts.zero = True
        return self.plain

    def _shifted(self, by: float) -> tuple[Divisor, bool] | None:
        return None if self.inverse else (self.divisor.shifted(by), False)

    def _times(self, by: float) -> tuple[Divisor, bool] | None:
        return (self.divisor.times(1 / by if self.inverse else by), self.inverse) if by > 0 else None

    def _below(self, by: float) -> tuple[Divisor, bool] | None:
        return (self.divisor.times(by if self.inverse else 1 / by), not self.inverse) if by > 0 else None

    def _made(self, function: Callable[[Any, Any], Any], other: Any, change: Change) -> Any:
        if isinstance(other, Count):
            return function(self.plain, other.plain)
        if type(other) not in (int, float):
            return NotImplemented
        value = function(self.plain, other)
        meaning = change(other)
        return value if meaning is None else _count(self.facts, value, *meaning)


class _IntCount(Count, int):
    pass


class _FloatCount(Count, float):
    pass


def counted(facts: Facts, x: object) -> Count | None:
    """The number as one that counts this microbatch's rows: one that another call has kept is a plain one."""
    return x if isinstance(x, Count) and x.facts() is facts else None


def counting(facts: Facts, value: Any, made: object) -> Any:
    """The number that Python has read from a tensor: a Count if the tensor counts rows."""
    divisor = divided(made) if isinstance(made, Number) and type(value) in (int, float) else None
    return value if divisor is None else _count(weakref.ref(facts), value, divisor, False)


def _count(facts: weakref.ref[Facts], value: int | float, divisor: Divisor, inverse: bool) -> Count:
    count: Count = _IntCount(value) if isinstance(value, int) else _FloatCount(value)
    count.plain, count.divisor, count.inverse, count.facts = value, divisor, inverse, facts
    return count
