"""What is known about the tensors and numbers with which one microbatch's code computes.

    a tensor is     if
    ROWS            it has the rows of the batch, like most tensors
    Row             it belongs to one row: x[i], an entry of a list with one entry per row
    CONSTANT        it is the same for every microbatch: made from parameters, numbers, or arguments that aren't split
    Number          its rows were added up: a sum, a mean, and sums, multiples and quotients of these
    Share           it has rows, or is a constant, and was divided by a number of the batch: mask / mask.sum()
    Shifted         it has rows, and a number was added to all of them
    Stack           it is several numbers: torch.stack([one, other])
    Unknown         rows met other rows (x.std(0)), or a number went through a nonlinear function (sqrt)

A sum that is divided by a Python number may be a mean. What n.item() returns knows what it counts (``counts``); other
numbers (len(x), int(n)) are recognised by their value. This fails for code that has read such a number, and divides a
sum by an equal one with another meaning.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from splitpipe.core.tensors import version_of
from splitpipe.loss.row_numbers import Positions, Reading, RowNumbers, Sizes, nearest, numbers
from splitpipe.loss.terms import BEFORE, GUESS, NONE, SUM, Divisor, Number, Shifted, Term, Unknown, divided, few_digits
from splitpipe.loss.terms import CONSTANT as A_CONSTANT


@dataclass(frozen=True)
class Row:
    """Belongs to one row of the batch, given by its number."""

    row: int


@dataclass(frozen=True)
class Share:
    """A value with rows, or a constant, divided by a number of the batch."""

    divisor: Divisor
    rows: bool


@dataclass(frozen=True)
class Stack:
    """Several numbers in one tensor."""

    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Plain:
    """A tensor that one word describes."""

    word: str


ROWS, CONSTANT = Plain("rows"), Plain("constant")
Made = Number | Unknown | Row | Share | Stack | Shifted | Plain


def is_constant(made: Made) -> bool:
    """True for values that are the same in all microbatches, including the 0 that a sum may start from."""
    return made is CONSTANT or isinstance(made, Number) and not made.terms


class Facts:
    """The facts of one microbatch of ``rows`` rows.

    ``given``: numbers among the call's arguments, which are the same for every microbatch.
    """

    def __init__(self, rows: int, given: Iterable[float] = ()) -> None:
        self.rows = max(1, rows)
        self._given = frozenset(given)
        self._made: dict[int, tuple[weakref.ref[Tensor], Made, bool]] = {}
        self._axes: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # Where it isn't the likely one.
        self.positions: dict[int, Positions] = {}
        self.sizes = Sizes(self.rows)
        self._counts: list[tuple[float, Divisor]] = []  # Numbers that Python has read, and what they count.
        self.of_rows = RowNumbers(self.rows)  # Others, of single rows.
        self.statistics: dict[float, str] = {}  # Other numbers that Python has read, and the functions they come from.
        self.reading = Reading()
        self._host = False  # Whether Python has read numbers of unknown meaning.
        self.by_row = False  # Whether code has looked at single rows, of which Python may know the number.
        self.asked = 0  # How many numbers and conditions Python has read, on which later code may depend.
        self.condition = ""  # A condition on a number that Python has evaluated.
        #: Python's numbers that functions got after it had read others: all microbatches should have the same ones.
        self.figures: list[Any] = []

    def put(self, x: Tensor, made: Made) -> None:
        """Records what a tensor consists of."""
        if isinstance(made, Number) and any(t.divisor is not None and not t.asked for t in made.terms):
            made = replace(made, terms=tuple([
                t if t.divisor is None or t.asked else replace(t, asked=self.asked or BEFORE) for t in made.terms
            ]))
        self.by_row = self.by_row or isinstance(made, Row)
        if made is not ROWS or id(x) in self._made or x.grad_fn is None or not x.dim():
            self._made[id(x)] = weakref.ref(x), made, x.grad_fn is not None

    def of(self, x: Any) -> Made:
        """What a value consists of."""
        made = self.share(x)
        if isinstance(made, Share) and made.divisor is NONE:
            return ROWS if made.rows else CONSTANT
        return made

    def share(self, x: Any) -> Made:
        """What a value consists of, including that it was divided by a number that may be max(n, 1)."""
        if not isinstance(x, Tensor):
            return CONSTANT
        found = self._made.get(id(x))
        if found is not None and found[0]() is x:
            if found[2] or not isinstance(x.grad_fn, BackwardCFunction):
                return found[1]  # Otherwise, an autograd function has made it, whose graph isn't traced.
        elif x.grad_fn is None:
            return CONSTANT
        # It comes from a block or an autograd function, whose code no mode sees.
        return ROWS if x.dim() else Unknown(x.grad_fn.name() if x.grad_fn is not None else "")

    def begin(self, value: Any) -> None:
        """Records an argument."""
        for x in tensors((value,)):
            if x.dim() and self.of(x) is CONSTANT:
                self.put(x, ROWS)
            elif not x.dim() and id(x) not in self._made:
                self.put(x, CONSTANT)

    def returned(self, value: Any, block: Callable[[], str]) -> None:
        """Records what an untraced block, with this name, has returned."""
        self.reading.plain.update(numbers(value))
        for x in tensors((value,)):
            if not x.dim():
                self.put(x, Unknown(block()))
            elif x.grad_fn is None:
                self.put(x, ROWS)
            if numbers(value):
                self.sized(x, False)  # Which they may have been computed from.

    def learn(self, other: Facts) -> None:
        """Records what a traced block has read, from which it has computed numbers that it returns."""
        self._counts += other._counts
        self._host = self._host or other._host
        self.statistics.update(other.statistics)
        self.sizes.shapes |= other.sizes.shapes
        self.sizes.lengths |= other.sizes.lengths

    def begin_rows(self, values: Iterable[Any]) -> None:
        """Records a list with one entry per row; the sum of its numbers, such as lengths, is a count."""
        values = list(values)
        for number, value in enumerate(values):
            for x in tensors((value,)):
                self.put(x, Row(number))
        if values and all(type(value) in (int, float) for value in values):
            self._counts.append((float(sum(values)), Divisor(float(sum(values)))))
            self.reading.plain.add(sum(values))

    def link(self, x: Tensor, y: Tensor) -> None:
        """Records that a tensor is equal to another, for example on another device."""
        found = self._made.get(id(x))
        if found is not None and found[0]() is x:
            self._made[id(y)] = weakref.ref(y), found[1], y.grad_fn is not None
        axis = self.turned(x)
        if axis is not None:
            self.turn(y, axis)

    def number(self, x: Tensor) -> Number | Unknown | None:
        """What a tensor without rows consists of; None for one with rows."""
        made = self.of(x)
        if made is ROWS and not x.dim():
            return Unknown("squeeze")
        if made is ROWS or x.dim() and not isinstance(made, Number):
            return None
        if self.condition:
            return Unknown(self.condition)
        if isinstance(made, Row):
            made = of_row(x, made)
        if made is CONSTANT:
            return Number((term(x, A_CONSTANT),), asked=self.asked)
        if isinstance(made, Number):
            changed = any(
                isinstance(t.value, Tensor) and t.version is not None and t.value._version != t.version
                for t in made.terms
            )
            if not self.asked and 0 < len(made.rows) < self.rows:
                return Unknown("a part of the rows")
            if changed or made.least is not None:
                return Unknown("an in-place function" if changed else "clamp")
            return replace(made, asked=self.asked, figures=tuple(self.figures)) if self.asked else made
        return made if isinstance(made, Unknown) else Unknown("div")

    def is_count(self, value: float) -> bool:
        """True if a number is one that was read and counts, or the inverse of one."""
        return any(math.isclose(count, x, rel_tol=1e-6) for count, _ in self._counts for x in (value, 1 / value))

    def other(self, name: str, given: Sequence[Any], out: Tensor) -> Made:
        """The result of a function without a rule: taken as computed for each row separately, if it has rows."""
        made = [CONSTANT if is_constant(each) else self._whole(each) for each in map(self.of, given)]
        for each in made:
            if isinstance(each, Unknown):
                return each
        if any(isinstance(each, (Number, Share, Stack, Shifted)) for each in made) or self._pairs(given, made):
            return Unknown(name)
        if all(each is CONSTANT for each in made):
            return CONSTANT
        numbers = {each.row for each in made if isinstance(each, Row)}
        if len(numbers) == 1:
            return Row(*numbers)
        # The dimension of a single row may have been squeezed.
        squeezed = all(not x.dim() for x, each in zip(given, made) if each is ROWS)
        return ROWS if not numbers and (out.dim() or squeezed) else Unknown(name)

    def _whole(self, made: Made) -> Made:
        """Of a single row, what was divided by 1 is whole: more often a scale of 1.0 than the number of rows."""
        if isinstance(made, Share) and self.rows == 1 and made.divisor.source is None and made.divisor.count == 1:
            return ROWS if made.rows else CONSTANT
        return made

    def _pairs(self, given: Sequence[Any], made: Sequence[Made]) -> bool:
        """True if rows meet other rows, mostly by broadcasting: x[:, None] - x[None]."""
        both = [x for x, each in zip(given, made) if each is ROWS and x.dim() > 1]
        if len(both) < 2 or len({x.dim() for x in both}) > 1:
            return False
        sizes = [(x.shape[self.axis(x)], self.axis(x)) for x in both]
        return len({axis for _, axis in sizes}) > 1 and all(
            x.shape[axis] in (1, self.rows) for x in both for _, axis in sizes if axis != self.axis(x)
        )

    def read(self, value: Any, made: Made, plain: bool) -> None:
        """Records a number that Python has read from a tensor; if it is ``plain``, it doesn't report its use."""
        self.asked += 1
        divisor = divided(made) if isinstance(made, Number) else None
        if divisor is not None:
            self._counts.append((float(value), divisor))
            self.reading.read(value, plain)
        elif made is not CONSTANT:
            self._host = True
            if isinstance(made, Row):
                self.of_rows.read(made.row, [value])
            if type(value) is float and not value.is_integer() and not isinstance(made, Row):
                self.statistics[value] = made.function if isinstance(made, Unknown) else "item"

    def count(self, value: float) -> Divisor | None:
        """What a Python number counts that equals one read from a tensor; small ones have other meanings, too."""
        known = [divisor for count, divisor in self._counts if value > 4 and math.isclose(value, count, rel_tol=1e-6)]
        return known[0] if known and value not in self._given else None

    def compared(self, made: Number, name: str, other: Any) -> Made:
        """The result of comparing a number with another one."""
        divisor = divided(made)
        if divisor is None:
            return Unknown(name)
        if isinstance(other, (int, float)):  # max(n, 1) may be 1.
            self._counts.append((float(other), replace(divisor, least=other)))
        return CONSTANT

    def sized(self, x: Tensor, length: bool) -> None:
        """Records that Python has read a tensor's shape or length."""
        made = self.of(x)
        if made is ROWS and x.dim() and all(type(size) is int for size in x.shape):  # Not in torch's compiler.
            axis = self.axis(x)
            self.reading.zero = self.reading.zero or x.shape[axis] == 0
            self.sizes.shapes.add((x.shape[axis], *x.shape[:axis], *x.shape[axis + 1 :]))
            if length:
                self.sizes.lengths.add(x.shape[0])
                self.reading.plain.update([] if axis else [x.shape[0]])
        if isinstance(made, Row):
            self._host = True
            self.of_rows.read(made.row, [*x.shape, x.numel()])

    def divisor(self, value: float, made: Number, small: bool = True) -> Divisor | Unknown | None:
        """The meaning of a number that divides a sum; None if all microbatches have it.

        Another number than a Count that equals a size is one if it is plain or if ``small`` (1.0 * n); above 4, also if
        it has all rows or elements, or if single rows were read.
        """
        if value in self._given:
            return None
        if value < 0:
            found = self.divisor(-value, made, small)
            return _negative(found) if isinstance(found, Divisor) else found
        if made.rows and value == len(made.rows):
            return Divisor(value)
        said = Unknown("a sum divided by a number that may be a count")
        known = [(count, divisor) for count, divisor in self._counts if math.isclose(value, count, rel_tol=1e-6)]
        if self.least(value):
            return said if known or self.sizes.has(value) else NONE
        if known:
            return known[0][1] if len({id(divisor.source) for _, divisor in known}) == 1 else said
        plain = value in self.reading.plain
        if self.sizes.has(value):
            # What x.shape.numel() returns isn't a Count; with a single row, it is another product, too.
            whole = {self.rows, *(map(math.prod, self.sizes.shapes) if self.rows > 1 else ())}
            likely = value > 4 and (self.by_row or value in whole or self._has_part(value))
            return Divisor(value, source=None if plain else GUESS) if plain or small or likely else None
        may_count = self._has_part(value) or (small or self.by_row) and self.may_count(value)
        return said if value > 1 and (self._host or plain and not self.sizes.is_other(value)) or may_count else None

    def factor(self, value: float, made: Number) -> Divisor | Unknown | None:
        """The divisor whose inverse a Python number is, by which a sum is multiplied; None if all microbatches have it.

        0.1 may be 1 / 10 for two rows of five elements, but is more often a weight, like other numbers with one or two
        digits.
        """
        if self.least(value):
            return NONE
        if value < 0:
            found = self.factor(-value, made)
            return _negative(found) if isinstance(found, Divisor) else found
        by = nearest(1 / value)
        if not few_digits(value):
            return Divisor(by) if self.sizes.shapes and few_digits(value * self.rows) else self.divisor(by, made)
        if by in self.sizes.lengths:
            return self.divisor(by, made)
        counts = self.rows > 1 and self.sizes.shapes and (self.sizes.has(by) or by == 2 * self.rows)  # 1.0 is a weight.
        return Unknown("a sum times a number that may be 1 / count") if counts else None

    def may_be_plain(self, value: int) -> bool:
        """True if a number that isn't a Count may be one; small ones are constants more often."""
        part = self._has_part(value) and self.sizes.has(value)
        return value in self.reading.plain or part or value == self.rows > 4

    def _has_part(self, value: float) -> bool:
        """True if a number may have been computed from a plain count; more often, it is another dimension's size."""
        return self.reading.has_part(value) and not self.sizes.is_other(value)

    def may_count(self, value: float) -> bool:
        """True if a number may have been computed from a number of rows: 2 * len(x)."""
        if not self.sizes.shapes and not self._counts:
            return False
        of_rows = bool(self.sizes.shapes) and self.rows > 1 and value >= self.rows and value % self.rows == 0
        return of_rows or any(count > 1 and value > count and not value % count for count, _ in self._counts)

    def least(self, value: object) -> bool:
        """True if a number may be max(n, 1) where the count n is 0."""
        return self.reading.zero and type(value) in (int, float) and value == 1

    def turn(self, x: Tensor, axis: int) -> None:
        """Records which dimension has the rows."""
        self._axes[id(x)] = weakref.ref(x), axis

    def inherit(self, given: Iterable[Any], out: Any) -> None:
        """Records that the result of a function or block has the rows where its argument has them."""
        if not self._axes:
            return
        for x in tensors(given):
            axis = self.turned(x)
            for y in tensors((out,)) if axis is not None else ():
                if x.dim() == y.dim() > 0 and x.shape[axis] == y.shape[axis]:  # type: ignore[index]
                    self.turn(y, axis)  # type: ignore[arg-type]

    def turned(self, x: Tensor) -> int | None:
        """The dimension that has the rows, if it was recorded."""
        found = self._axes.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def divided(self, x: Tensor) -> bool:
        """True if a part of the rows was put into another dimension: x.view(2, -1)."""
        axis = self.turned(x)
        return axis is not None and x.shape[axis] < self.rows

    def axis(self, x: Tensor) -> int:
        """The dimension that has the rows, as recorded, or else the likely one."""
        found = self.turned(x)
        if found is not None:
            return found
        shape = x.shape
        return shape.index(self.rows) if shape[0] % self.rows and self.rows in shape else 0


def term(value: Any, kind: str, divisor: Divisor | None = None, function: str = "") -> Term:
    """A term with its tensor's version: a later write would otherwise go unnoticed."""
    return Term(value, kind, divisor, 1.0, function, version_of(value) if isinstance(value, Tensor) else None)


def of_row(x: Tensor, made: Row) -> Number:
    """A row's number, as a part of a sum."""
    return Number((term(x, SUM, None, "the numbers of rows"),), frozenset([made.row]))


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nestings of tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())


def _negative(divisor: Divisor) -> Divisor | Unknown:
    if divisor.least is not None:
        return Unknown("neg")
    return Divisor(divisor.count * -1, divisor.more * -1, None, divisor.source)
