"""Numbers that are divided by a count, or multiplied by one: sums become means, and means become sums."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.counts import Count
from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Made, Row, Share, is_constant, term
from splitpipe.loss.terms import CONSTANT as A_CONSTANT
from splitpipe.loss.terms import GUESS, MEAN, RATIO, SUM, Divisor, Number, Term, Unknown, by_rows, divided, divided_by

A_COUNT = "a number that counts rows"


def undivided(number: Number) -> bool:
    return number.least is None and all(t.divisor is None for t in number.terms)


def resolved(made: Number, x: Any) -> Number:
    """The number ``x``, which is divided by a count now: what it was multiplied by before were constants."""
    divided = [t for t in made.terms if t.divisor is not None]
    if not divided or any(t.doubt is None for t in divided):
        return made
    terms = tuple([
        t if t.doubt is None else replace(t.doubt, factor=t.doubt.factor * t.factor) for t in made.terms
    ])
    if len(terms) > 1 and all(t.kind is SUM for t in terms):
        terms = (term(x, SUM, None, terms[0].function),)
    return replace(made, terms=terms)


def unguessed(made: Number) -> Number:
    """The number, which is divided by a count now: if it was divided by what equals a size, that was a constant."""
    return replace(made, terms=tuple([
        replace(t, kind=SUM, divisor=None) if t.kind is MEAN and t.divisor is not None and t.divisor.source is GUESS
        else t for t in made.terms
    ]))


def over(made: Number, divisor: Divisor, out: Tensor, name: str, above: Any, doubt: float | None = None) -> Made:
    """The quotient of a sum and a count; ``doubt``: the factor by which it is made, if that may be a constant."""
    made = resolved(unguessed(made), above)
    if not undivided(made):
        return Unknown(name)
    if len(made.terms) == 1 and made.terms[0].kind is SUM and (made.terms[0].factor == 1 or out.numel() > 1):
        one = made.terms[0]
        sums = None if doubt is None else replace(one, factor=one.factor * doubt)
        return Number((replace(term(out, MEAN, divisor, one.function), doubt=sums),), made.rows)
    here = divided_by(divisor.here)
    terms = [
        replace(t, divisor=divisor) if t.kind is A_CONSTANT
        else replace(term(t.value / here, MEAN, divisor, t.function), factor=t.factor)
        for t in made.terms
    ] if out.numel() == 1 else []
    if doubt is not None:
        terms = [replace(own, doubt=replace(t, factor=doubt)) for own, t in zip(terms, made.terms)]
    return Number(tuple(terms), made.rows) if terms else Unknown(name)


def doubted(made: Number, function: str, rows: int, out: Tensor, doubt: float | None) -> Made:
    """The product of a sum and what may be the inverse of a count: a mean, unless it is divided by a count later."""
    if len(made.terms) > 1 or doubt is None:
        return Unknown(function)
    mean = by_rows(out, rows, function).terms[0]
    return Number((replace(mean, doubt=replace(made.terms[0], factor=made.terms[0].factor * doubt)),))


def by_divisor(made: Made, divisor: Divisor, out: Tensor, name: str, above: Any) -> Made:
    if divisor.source is RATIO:
        return Unknown(A_COUNT)
    if isinstance(made, Number):
        return over(made, divisor, out, name, above)
    return Share(divisor, made is not CONSTANT) if made in (CONSTANT, ROWS) or isinstance(made, Row) else Unknown(name)


def mean_by_mean(made: Made, by: Number, out: Tensor, name: str) -> Made:
    """For means over the same number of elements, the quotient is that of the sums: x / (m + e) is nx / (nm + ne)."""
    above = made.terms if isinstance(made, Number) and made.least is None else ()
    below = [t for t in by.terms if t.kind is MEAN]
    constants = [t for t in by.terms if t.kind is A_CONSTANT and t.divisor is None]
    means = [t for t in (*above, *below) if t.kind is MEAN and t.divisor is not None and t.divisor.more == 0]
    counts = {None if isinstance(t.divisor.here, Tensor) else t.divisor.here for t in means}  # type: ignore[union-attr]
    if len(above) != 1 or len(below) != 1 or len(means) < 2 or len(below) + len(constants) < len(by.terms) or (
        len(counts) > 1 or None in counts
    ):
        return Unknown(name)
    many: Any = counts.pop()
    kinds = {MEAN: SUM, A_CONSTANT: A_CONSTANT}
    sums = [replace(t, kind=kinds[t.kind], divisor=None, factor=t.factor * many) for t in by.terms]
    total = divided(Number(tuple(sums), least=None if by.least is None else by.least * many))
    if total is None:
        return Unknown(name)
    total = replace(total, count=total.count + total.more, more=0.0)  # Both grow with the rows.
    scale = torch.where(total.here == 0, many, 1.0) if isinstance(total.here, Tensor) else 1.0
    return Number((term(out * scale, MEAN, total, above[0].function),))


def rising(count: Count, by: Any) -> Number:
    """The number n * ``by``, which grows with the rows."""
    terms = [term(count.divisor.count * by, SUM, None, "a count")]
    if not isinstance(count.divisor.more, float) or count.divisor.more:
        terms.append(term(count.divisor.more * by, A_CONSTANT))
    return Number(tuple(terms))


def tensor_of(count: Count) -> Made:
    """A tensor that is made of a count."""
    if count.divisor.source is RATIO or count.divisor.least is not None:
        return Unknown(A_COUNT)
    return Share(count.divisor, False) if count.inverse else rising(count, 1.0)


def times_count(facts: Facts, name: str, x: Tensor, made: Made, count: Count, out: Tensor) -> Made:
    """A constant, or a mean, times a count: a sum."""
    many = count.divisor
    if is_constant(made) and made is not CONSTANT:
        return made
    if many.least is None and x.is_floating_point():
        if made is CONSTANT and x.numel() == 1:
            return rising(count, x)
        if made is CONSTANT and _is_plain(many):
            return Number((term(out, SUM, None, name),))
        if isinstance(made, Number) and made.terms and made.least is None and _is_plain(many) and all(
            _grows(facts, t) for t in made.terms
        ):
            return replace(made, terms=tuple([_total(t, many) for t in made.terms]))
    return with_count(facts, name, [x], out)


def _grows(facts: Facts, one: Term) -> bool:
    """True for a constant, and for a mean over as many entries in each row."""
    if one.kind is not MEAN or one.divisor is None:
        return one.kind is A_CONSTANT and one.divisor is None
    sure = one.doubt is None and not one.unknown and _is_plain(one.divisor)
    return sure and float(one.divisor.count) % facts.rows == 0


def _total(one: Term, many: Divisor) -> Term:
    """A mean or constant times a count."""
    if one.divisor is None:
        return replace(term(one.value * many.count, SUM, None, "a count"), factor=one.factor)
    # The ratio of the counts must be the same in all microbatches, like other factors.
    factor = one.factor * float(many.count) / float(one.divisor.count)
    return replace(term(one.value * one.divisor.count, SUM, None, one.function), factor=factor)


def _is_plain(divisor: Divisor) -> bool:
    """True for a number that is known on the host, and grows with the rows."""
    sizes = divisor.count, divisor.more, divisor.least
    return isinstance(sizes[0], float) and sizes[0] != 0 and sizes[1:] == (0.0, None)


def with_count(facts: Facts, name: str, given: Sequence[Any], out: Tensor) -> Made:
    """What meets a count that isn't a divisor: a value of the batch can't, but an index can."""
    return Unknown(A_COUNT) if out.is_floating_point() else facts.other(name, given, out)
