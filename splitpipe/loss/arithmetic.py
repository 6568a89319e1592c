"""Rules for linear functions: what sums, products, quotients and means make of numbers."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.counts import counted
from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Made, Row, Share, Stack, is_constant, of_row, term
from splitpipe.loss.quotients import (
    A_COUNT,
    by_divisor,
    doubted,
    mean_by_mean,
    over,
    resolved,
    rising,
    times_count,
    undivided,
    unguessed,
    with_count,
)
from splitpipe.loss.row_numbers import nearest
from splitpipe.loss.terms import CONSTANT as A_CONSTANT
from splitpipe.loss.terms import (
    MEAN,
    NONE,
    SUM,
    Divisor,
    Number,
    Shifted,
    Unknown,
    by_rows,
    divided,
    divided_by,
    few_digits,
)


def in_place(name: str) -> bool:
    """True for a function that writes to its first argument."""
    return name.startswith("__i") or name.endswith("_") and name[:1] != "_" and name != "requires_grad_"


def before(facts: Facts, name: str, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments with which to call a division, or a function that works in place."""
    if in_place(name) and isinstance(args[0], Tensor):
        _keep_value(facts, args[0])
    if name in DIVISIONS and len(args) == 2:
        below = args[DIVISIONS[name]]
        count = counted(facts, below)
        if count is not None and not count.plain:
            return [1 if x is below else x for x in args]
        made = number_of(facts, below)
        total = isinstance(made, Number) and made.least is None and any(t.kind is not A_CONSTANT for t in made.terms)
        if total and below.numel() == 1 and not below.requires_grad:  # x / 0 becomes x / 1: see ``terms``.
            guarded = torch.where(below == 0, torch.ones_like(below), below)
            return [guarded if x is below else x for x in args]
    return args


def _keep_value(facts: Facts, x: Tensor) -> None:
    """Keeps a number's value from before it is written to in place."""
    made = facts.of(x)
    if made is CONSTANT and x.numel() == 1:
        facts.put(x, Number((term(x.clone(), A_CONSTANT),)))
    elif isinstance(made, Number) and any(t.value is x for t in made.terms):
        kept = [replace(t, value=x.clone(), version=0) if t.value is x else t for t in made.terms]
        facts.put(x, replace(made, terms=tuple(kept)))


def number_of(facts: Facts, x: Any) -> Made:
    """What a value consists of; a row's number as a number."""
    made = facts.of(x)
    return of_row(x, made) if isinstance(made, Row) and not x.dim() else made


def _counted(facts: Facts, values: Sequence[Any], row: Row, divided: bool) -> bool:
    """True if a row's value is divided by a number of the batch, or multiplied by its inverse."""
    sums = Number((term(0.0, SUM),), frozenset([row.row]))
    for x in values:
        if isinstance(x, Tensor) or not x or _of_row(facts, x if divided else 1 / x, row):
            continue
        by = facts.divisor(float(x), sums, not isinstance(x, int)) if divided else facts.factor(float(x), sums)
        if by not in (None, NONE):
            return True
    return False


def _of_row(facts: Facts, value: float, row: Row) -> bool:
    return facts.of_rows.has(row.row, value) and (facts.rows == 1 or not facts.sizes.has(value))


def single(made: Number, out: Tensor, name: str) -> Made:
    """A number with a single term after a linear function: the term's value is the result, including the factor."""
    if len(made.terms) != 1 or made.least is not None:
        return Unknown(name) if made.terms else made
    one = made.terms[0]
    if one.kind is A_CONSTANT and one.divisor is not None:
        return Unknown(name)
    kind = one.kind if one.divisor is None else MEAN  # The result has been divided, even if the term's value hasn't.
    doubt = None if one.doubt is None else term(out, SUM, None, one.doubt.function)
    whole = term(out, kind, one.divisor, one.function)
    return replace(made, terms=(replace(whole, asked=one.asked, unknown=one.unknown, doubt=doubt),))


def _varies(x: Any) -> bool:
    """True for a tensor with a gradient."""
    return isinstance(x, Tensor) and x.requires_grad


def _imaginary(values: Sequence[Any]) -> bool:
    return any(isinstance(x, complex) for x in values)


def negative(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    made = facts.of(args[0])
    return made if isinstance(made, Row) else _times(args[0], -1.0, out, name, facts)


def add(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    given = [*args, *([kwargs["other"]] if "other" in kwargs else [])]
    alpha = kwargs.get("alpha", 1)
    if len(given) != 2 or kwargs.keys() - {"other", "alpha"} or _imaginary([*given, alpha]):
        return facts.other(name, given, out)
    if any(counted(facts, x) is not None for x in given) and not any(
        isinstance(number_of(facts, x), Number) for x in given
    ):
        return with_count(facts, name, given, out)
    if counted(facts, alpha) is not None:
        return Unknown(A_COUNT)
    signs = [1.0, float(alpha)]
    if "sub" in name:
        signs = [-float(alpha), 1.0] if name.endswith("rsub__") or name == "rsub" else [1.0, -float(alpha)]
    row = one_row([facts.of(x) for x in given])
    # If there is a single row, a sum that starts from 0 is one over rows.
    if row is not None and (facts.rows > 1 or all(isinstance(x, Tensor) or x for x in given)):
        return row
    made = [number_of(facts, x) for x in given]
    if any(isinstance(each, Stack) for each in made):
        return _sums(facts, name, list(zip(given, made, signs)), out)
    shifted = [_shifted(x, each, sign, rest, out) for x, each, sign, rest in zip(given, made, signs, made[::-1])]
    if any(shifted):
        return shifted[0] or shifted[1]
    if all(not isinstance(each, Number) or ROWS in made and is_constant(each) for each in made):
        return facts.other(name, given, out)
    return _sum(facts, name, list(zip(given, made, signs)), out)


def _shifted(x: Any, made: Made, sign: float, other: Made, out: Tensor) -> Shifted | None:
    """Rows to which a number is added: their mean is the sum of two numbers."""
    if isinstance(made, Number) and made.terms and made.least is None and not made.rows and x.numel() == 1:
        made, known = Shifted(made, x.clone()), other is ROWS and out.dim() > 0
    else:
        known = isinstance(made, Shifted) and (other is ROWS or other is CONSTANT)
    return Shifted(made.number.scaled(sign), made.by * sign) if known and isinstance(made, Shifted) else None


def one_row(made: Sequence[Made]) -> Row | None:
    """The row, if everything belongs to one row or is constant."""
    rows = {each.row for each in made if isinstance(each, Row)}
    return Row(*rows) if len(rows) == 1 and all(isinstance(each, Row) or is_constant(each) for each in made) else None


def _sums(facts: Facts, name: str, parts: Sequence[tuple[Any, Made, float]], out: Tensor) -> Made:
    """Several sums in one tensor."""
    several: list[list[tuple[Any, Made, float]]] = [[] for _ in range(out.numel())]
    for x, made, sign in parts:
        whole = isinstance(x, Tensor) and x.dim() > 0
        if made is not CONSTANT and not isinstance(made, Stack) or whole and x.shape != out.shape:
            return Unknown(name)
        for k, value in enumerate(x.flatten().unbind() if whole else [x] * out.numel()):
            several[k].append((value, made.numbers[k] if isinstance(made, Stack) else made, sign))
    found = [_sum(facts, name, each, to) for each, to in zip(several, out.flatten().unbind())]
    numbers = tuple([number for number in found if isinstance(number, Number)])
    return Stack(numbers) if len(numbers) == len(found) else Unknown(name)


def dot(facts: Facts, name: str, x: Tensor, y: Tensor) -> Made | None:
    """The sum of several numbers, each multiplied by a constant; None if the factors aren't that."""
    made = _times(x, y, y, name, facts) if isinstance(facts.of(x), Stack) and facts.of(y) is CONSTANT else None
    return Number(tuple([t for number in made.numbers for t in number.terms])) if isinstance(made, Stack) else made


def _sum(facts: Facts, name: str, parts: Sequence[tuple[Any, Made, float]], out: Tensor) -> Made:
    numbers: list[Number] = []
    for x, made, sign in parts:
        count = counted(facts, x)
        if count is not None:
            if count.inverse or count.divisor.least is not None:
                return Unknown(A_COUNT)
            numbers.append(rising(count, 1.0).scaled(sign))
        elif made is CONSTANT:
            whole = sign > 0 and "sub" in name and not isinstance(x, Tensor) and x != 1 and facts.sizes.has(x) and all(
                undivided(other) for _, other, _ in parts if isinstance(other, Number))
            if isinstance(x, Tensor) or x != 0:  # mask.numel() - mask.sum() counts elements.
                numbers.append(Number((replace(term(x, SUM if whole else A_CONSTANT), factor=sign),)))
        elif isinstance(made, Number) and made.least is None:
            numbers.append(made.scaled(sign))
        elif isinstance(made, Share) and not made.rows and made.divisor is not NONE and x.numel() == out.numel() == 1:
            constant = term(x * divided_by(made.divisor.here), A_CONSTANT, made.divisor)
            numbers.append(Number((replace(constant, factor=sign),)))
        elif isinstance(made, Unknown) and not x.dim():  # The other terms are exact nevertheless.
            numbers.append(by_rows(x, facts.rows, made.function).scaled(sign))
        else:
            return made if isinstance(made, Unknown) else Unknown(name)
    terms = tuple(t for number in numbers for t in number.terms)
    if terms and all(t.kind is A_CONSTANT and t.divisor is None for t in terms):
        return CONSTANT
    rows = frozenset[int]().union(*(number.rows for number in numbers))
    if terms and all(t.kind is SUM and t.divisor is None for t in terms):
        return Number((term(out, SUM, None, terms[0].function),), rows)
    return Number(terms, rows) if out.numel() == 1 else single(Number(terms, rows), out, name)


def multiply(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    if len(args) == 2 and not _imaginary(args):
        x, count = args[0], counted(facts, args[1])
        if count is None:
            x, count = args[1], counted(facts, args[0])
        if count is not None:
            made_of = number_of(facts, x)
            if isinstance(made_of, Unknown):
                return made_of
            if not count.inverse:
                return times_count(facts, name, x, made_of, count, out)
            return by_divisor(made_of, count.divisor, out, name, x)
        row = one_row([facts.of(x) for x in args])
        if row is not None and not _counted(facts, args, row, False):
            return row
        made = [number_of(facts, x) if isinstance(facts.of(x), Row) else facts.share(x) for x in args]
        for one, other, x, y in ((*made, *args), (*made[::-1], *args[::-1])):
            found = _product(facts, name, one, other, x, y, out)
            if found is not None:
                return found
    return facts.other(name, [*args, *kwargs.values()], out)


def _product(facts: Facts, name: str, one: Made, other: Made, x: Any, y: Any, out: Tensor) -> Made | None:
    if isinstance(one, Unknown):
        return one
    if one is CONSTANT and other is CONSTANT and _varies(x) and facts.sizes.may_make(y):
        return Unknown("a constant times a number that may be a count")
    if one is ROWS and facts.least(y):
        return Share(NONE, True)
    if one is ROWS and type(y) is float and y > 0 and not few_digits(y) and facts.sizes.has(nearest(1 / y)):
        return Share(Divisor(nearest(1 / y)), True)
    if isinstance(one, (Number, Stack)) and other is CONSTANT:
        whole = isinstance(one, Stack) or all(t.divisor is None for t in one.terms)
        if isinstance(one, Number) and whole and not isinstance(y, Tensor) and y:
            divisor, doubt = facts.factor(float(y), one), None if in_place(name) else float(y)
            if isinstance(divisor, Unknown):
                if one.least is not None:
                    return divisor
                return doubted(one, divisor.function, facts.rows, out, doubt)
            if divisor is not None:
                return over(one, divisor, out, name, x, doubt if few_digits(y) else None)
        if not whole and isinstance(y, int) and y > 1 and facts.may_be_plain(y):
            return Unknown("a mean times a number that may be a count")
        return _times(x, y, out, name, facts)
    if not isinstance(one, Share):
        return None
    if other is ROWS or isinstance(other, Row):
        return Share(one.divisor, True)
    if other is CONSTANT:
        return one
    if one.rows or not isinstance(other, Number) or not undivided(other) or len(other.terms) > 1:
        return None
    return Number((term(out, MEAN, one.divisor, other.terms[0].function),), other.rows)


def _times(x: Tensor, factor: Any, out: Tensor, name: str, facts: Facts, power: int = 1) -> Made:
    """One or several numbers, multiplied or divided by a constant."""
    made = number_of(facts, x)
    if isinstance(made, Stack):
        factors = [factor] * len(made.numbers)
        if isinstance(factor, Tensor) and factor.dim():
            if out.shape != x.shape:
                return Unknown(name)
            factors = list(factor.expand_as(x).flatten())
        return Stack(tuple([_scaled(number, each, power) for number, each in zip(made.numbers, factors)]))
    if not isinstance(made, Number):
        return facts.other(name, [x, factor], out)
    if out.numel() > 1 or len(made.terms) == 1 and (out is x or isinstance(factor, Tensor)):
        return single(made, out, name)
    plain = not isinstance(factor, Tensor)
    if made.least is not None and not (plain and factor > 0) or plain and not factor and power < 0:
        return Unknown(name)
    return _scaled(made, factor, power)


def _scaled(made: Number, factor: Any, power: int) -> Number:
    if not isinstance(factor, Tensor):
        return made.scaled(float(factor) ** power)
    return replace(made, terms=tuple([
        replace(term(t.value * factor**power * t.factor, t.kind, t.divisor, t.function), asked=t.asked)
        for t in made.terms
    ]))


def divide(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    if name == "reciprocal":
        above, below = 1.0, args[0]
    elif len(args) != 2 or kwargs or _imaginary(args):
        return facts.other(name, [*args, *kwargs.values()], out)
    else:
        above, below = args if DIVISIONS[name] else args[::-1]
    plain = facts.of(above), facts.of(below)
    row = one_row(plain)
    if row is not None and not _counted(facts, [below], row, True):
        return row
    made, by = number_of(facts, above), number_of(facts, below)
    for each in (made, by):
        if isinstance(each, Unknown):
            return each
    if counted(facts, above) is not None:
        return Unknown(A_COUNT)
    count = counted(facts, below)
    if count is not None:
        return Unknown(A_COUNT) if count.inverse else by_divisor(made, count.divisor, out, name, above)
    long = type(below) is int and below > 4 and below in facts.sizes.lengths
    if made is CONSTANT and _varies(above) and facts.sizes.may_make(below) or long and isinstance(made, Number) and any(
        t.divisor is not None for t in resolved(made, above).terms
    ):
        return Unknown("a mean or constant divided by a number that may be a count")
    if made is ROWS and not isinstance(below, Tensor):
        length = Divisor(float(below)) if float(below) in facts.sizes.lengths else facts.count(float(below))
        length = NONE if facts.least(below) else length
        if length is not None:
            return Share(length, True)
    if by is CONSTANT and isinstance(made, (Number, Stack)):
        if isinstance(made, Number) and not isinstance(below, Tensor):
            sums = resolved(unguessed(made) if below in facts.reading.plain else made, above)
            some = all(t.divisor is None for t in sums.terms) and any(t.kind is SUM for t in sums.terms)
            divisor = facts.divisor(float(below), sums, not isinstance(below, int)) if some else None
            if isinstance(divisor, Divisor):
                return over(sums, divisor, out, name, above)
            if divisor is not None and all(t.divisor is None for t in made.terms):
                return divisor
        return _times(args[0], below, out, name, facts, -1)
    if by is CONSTANT and isinstance(made, Share):
        return made
    if not isinstance(by, Number) or below.numel() > 1:
        return facts.other(name, [above, below], out)
    divisor = divided(by)
    return mean_by_mean(made, by, out, name) if divisor is None else by_divisor(made, divisor, out, name, above)


def reduce(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Sums and means, over some dimensions or all."""
    x, mean = args[0], "mean" in name
    made = facts.of(x) if mean else facts.share(x)
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if isinstance(made, Number):
        return made if x.numel() == 1 else single(made, out, name)
    if isinstance(made, Shifted):
        if out.dim() or name != "mean":
            return Unknown(name)
        return Number((term(out - made.by, MEAN, Divisor(float(x.numel())), name), *made.number.terms))
    if isinstance(made, Stack):
        scale = 1 / len(made.numbers) if mean else 1.0
        terms = tuple([t for number in made.numbers for t in number.scaled(scale).terms])
        return Unknown(name) if out.dim() or name == "nanmean" else Number(terms)
    if made is not ROWS and not isinstance(made, Share):
        return made
    axes = [*range(x.dim())] if dims is None or dims == () else axes_of(x, dims)
    axis = facts.axis(x) if x.dim() else 0
    if x.dim() and axis not in axes:
        if out.dim() and out.dim() < x.dim():
            facts.turn(out, axis - sum(each < axis for each in axes))
        return made
    if isinstance(made, Share):
        return Number((term(out, MEAN, made.divisor, name),)) if made.rows and not mean else Unknown(name)
    if name == "nanmean":
        return Unknown(name) if out.dim() else Number((term(out, MEAN, Divisor((~x.isnan()).sum()), name),))
    count = Divisor(float(math.prod([x.shape[axis] for axis in axes]))) if mean else None
    return Number((term(out, MEAN if mean else SUM, count, name),))


def axes_of(x: Tensor, dims: Any) -> list[int]:
    given = dims if isinstance(dims, (tuple, list)) else [dims]
    return [dim % x.dim() for dim in given if isinstance(dim, int) and x.dim()]


DIVISIONS = {
    **dict.fromkeys("div div_ divide divide_ true_divide true_divide_ __truediv__ __itruediv__ __idiv__".split(), 1),
    **dict.fromkeys(["__rdiv__", "__rtruediv__"], 0),
}
