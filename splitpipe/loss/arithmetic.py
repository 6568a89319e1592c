"""Rules for sums, products, quotients and means: what they make of numbers of the batch."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import version_of
from splitpipe.loss.function_call import FunctionCall, size_along
from splitpipe.loss.ledger import GIVEN, MAY_COUNT, UNIFORM, VARIED, Constant, Ledger, Meaning, Quotient, Rows, Stack
from splitpipe.loss.terms import CONSTANT, MEAN, SUM, Amount, Count, Number, Term, Unknown


def keep_value(ledger: Ledger, x: Any) -> None:
    """Keeps a number's value from before it is written to in place."""
    meaning = ledger.of(x)
    if isinstance(meaning, Number) and any(term.value is x for term in meaning.terms):
        kept = x.clone()
        ledger.put(x, meaning.changed(
            lambda term: replace(term, value=kept, version=version_of(kept)) if term.value is x else term))


def add(call: FunctionCall) -> Meaning | None:
    """A sum or difference, of numbers or of entries."""
    ledger, args, alpha = call.ledger, call.args, call.kwargs.get("alpha", 1)
    meanings = [ledger.of(x) for x in args]
    if not any(isinstance(each, Number) for each in meanings) or any(isinstance(each, Rows) for each in meanings):
        return next((each for each in meanings if isinstance(each, Unknown)), None) or call.entries()
    signs = [-alpha, 1] if call.name == "rsub" else [1, -alpha if "sub" in call.name else alpha]
    terms: list[Term] = []
    unknown = ""
    for x, meaning, sign in zip(args, meanings, signs):
        number = meaning if isinstance(meaning, Number) else _as_number(call, x, meaning)
        if not isinstance(number, Number) or abs(alpha) != 1 and ledger.doubt(alpha):
            return number if isinstance(number, Unknown) else None
        terms += number.scaled(sign).terms
        unknown = unknown or number.unknown
    if terms and all(term.kind is SUM for term in terms):
        return Number((ledger.term(call.out, SUM, function=terms[0].function),))
    return Number(tuple(terms), unknown) if call.out.numel() == 1 else None


def _as_number(call: FunctionCall, x: Any, meaning: Meaning) -> Number | Unknown | None:
    """A constant next to a number, or one that isn't recognised."""
    value = call.number(x)
    if isinstance(meaning, Unknown) and x.numel() == 1:
        counts = [term.count for y in call.args for term in getattr(call.ledger.of(y), "terms", ()) if term.count]
        term = call.ledger.term(x, MEAN, next(iter(counts), Count(float(call.ledger.rows))), meaning.function)
        return Number((term,), meaning.function)
    if value is not None and abs(value) >= 1 and call.ledger.doubt(value):  # mask.numel() - mask.sum() counts elements.
        return Unknown(MAY_COUNT)
    if value is None and not (isinstance(meaning, Constant) and not meaning.made and isinstance(x, Tensor)):
        return None
    term = call.ledger.term(x if value is None else float(value), CONSTANT, function="a constant")
    return Number(() if value == 0 else (term,))


def multiply(call: FunctionCall) -> Meaning | None:
    """A product, of a number and a constant or of entries."""
    x, y = (call.args[0], -1.0) if "neg" in call.name else call.args
    return _scaled(call, x, y, 1) or _scaled(call, y, x, 1) or _entries(call)


def divide(call: FunctionCall) -> Meaning | None:
    """A quotient, by a constant, by a count, or of entries."""
    if call.kwargs.get("rounding_mode") is not None:
        return call.entries()
    above, below = call.args if len(call.args) == 2 else (1.0, call.args[0])
    above, below = (below, above) if call.name in ("rdiv", "rtruediv") else (above, below)
    by, value = call.ledger.of(below), call.number(above)
    counts = isinstance(by, Quotient) or isinstance(by, Number) and by.terms
    if not counts or not isinstance(below, Tensor) or below.numel() > 1:
        return _scaled(call, above, below, -1) or _entries(call)
    count = count_of(by)
    if count is None or value is None:
        return None if count is None else _over(call.ledger.of(above), count)
    return Unknown(MAY_COUNT) if call.ledger.doubt(value) > 1 else Quotient(float(value), count)


def count_of(meaning: Meaning) -> Count | None:
    """A number as a count; None if it isn't a sum, or has a gradient, which would depend on the whole batch's count."""
    if isinstance(meaning, Quotient):
        return meaning.count if meaning.above is None else None
    value: Amount | None = None
    more = 0.0
    for term in meaning.terms if isinstance(meaning, Number) else ():
        amount = term.value if term.factor == 1 else term.value * term.factor
        if isinstance(amount, Tensor) and (term.kind is not SUM or amount.requires_grad):
            return None
        if term.kind is CONSTANT:
            more += float(amount)
        else:
            value = amount if value is None else value + amount
    return None if value is None else Count(value, more)


def _entries(call: FunctionCall) -> Meaning | None:
    """A product or quotient of entries; of which some may be numbers that count rows."""
    rows, constants = call.joined(), [call.ledger.of(x) for x in call.args]
    values = [each.value for each in constants if isinstance(each, Constant) and each.value is not None]
    doubt = max(map(call.ledger.doubt, values), default=0)
    return replace(rows, doubt=max(rows.doubt, doubt)) if isinstance(rows, Rows) else rows


def _over(meaning: Meaning, count: Count) -> Meaning | None:
    """The quotient of a value and a count."""
    if isinstance(meaning, Rows) and meaning.share is None and not meaning.doubt:
        return replace(meaning, share=count)
    if isinstance(meaning, Number) and all(term.kind is SUM for term in meaning.terms):
        return meaning.changed(lambda term: replace(term, kind=MEAN, count=count, divided=False))
    return None


def _scaled(call: FunctionCall, x: Any, y: Any, power: int) -> Meaning | None:
    """x * y ** power, of a number or with a number of Python; None if it is neither."""
    meaning, by, value = call.ledger.of(x), call.ledger.of(y), call.number(y)
    if isinstance(x, Tensor) and value is not None:
        return _times(call, x, meaning, value, power)
    if isinstance(meaning, Quotient) and meaning.above is not None and power > 0:
        quotient = _over(by, meaning.count)
        return quotient.scaled(meaning.above) if isinstance(quotient, Number) else quotient
    plain = isinstance(by, Constant) and not by.made and call.out.numel() == 1
    if not isinstance(meaning, Number) or not meaning.terms or not plain:
        return None
    factor = y if power > 0 else y.reciprocal()
    return meaning.changed(lambda term: _by_tensor(term, factor))


def _by_tensor(term: Term, factor: Tensor) -> Term:
    """A term times a constant, which may want a gradient: not one of 0 / 0."""
    value = term.value
    if isinstance(value, Tensor) and term.count is not None and term.divided:
        here = term.count.here
        if isinstance(here, Tensor) or not here:
            value = torch.where(here == 0, 0, value) if isinstance(here, Tensor) else torch.zeros_like(value)
    product = value * factor
    return replace(term, value=product, version=version_of(product))


def _times(call: FunctionCall, x: Tensor, meaning: Meaning, value: float, power: int) -> Meaning | None:
    """x * value ** power, for a number of Python."""
    doubt = 0 if "neg" in call.name else call.ledger.doubt(value)
    if isinstance(meaning, Rows):
        return replace(meaning, doubt=max(meaning.doubt, doubt))
    if power < 0 and not value:
        return None
    factor = float(value) ** power
    if isinstance(meaning, (Number, Stack)):
        numbers = meaning.numbers if isinstance(meaning, Stack) else (meaning,)
        if doubt > all(term.kind is not SUM for number in numbers for term in number.terms):
            return Unknown(MAY_COUNT)
        if isinstance(meaning, Stack):
            return Stack(tuple([number.scaled(factor) for number in numbers]))
        return meaning.scaled(factor)
    if isinstance(meaning, Quotient):
        return None if meaning.above is None or doubt > 1 else replace(meaning, above=meaning.above * factor)
    if not isinstance(meaning, Constant) or doubt > 1 and not meaning.uniform:
        return Unknown(MAY_COUNT) if isinstance(meaning, Constant) else None
    return replace(meaning, value=meaning.value * factor if meaning.value and value else None, positions=None)


def reduce(call: FunctionCall) -> Meaning | None:
    """Sums and means, over some dimensions or all."""
    x, out, meaning, mean = call.args[0], call.out, call.meaning, "mean" in call.name
    if isinstance(meaning, Stack):
        scale = 1 / len(meaning.numbers) if mean else 1.0
        terms = [term for number in meaning.numbers for term in number.scaled(scale).terms]
        return None if out.dim() else Number(tuple(terms))
    if isinstance(meaning, Number):
        return meaning
    dims = call.dims() or [0]  # Of a single row.
    if isinstance(meaning, Constant):
        if not mean and meaning.made and 0 in dims and meaning.value != 0 and x.dim() and not len(x) % call.ledger.rows:
            return Unknown(MAY_COUNT)  # torch.ones_like(output).sum()
        if meaning.value is None:
            return VARIED if meaning.made else GIVEN
        return replace(UNIFORM, value=meaning.value if mean else meaning.value * size_along(x, dims))
    if not isinstance(meaning, Rows) or 0 not in dims:
        return meaning if isinstance(meaning, Rows) else None
    if meaning.doubt > mean:
        return Unknown(MAY_COUNT)
    if out.numel() > 1:
        return None
    if meaning.share is not None:
        return None if mean else Number((call.ledger.term(out, MEAN, meaning.share, call.name, meaning),))
    kind, count = (MEAN, Count(size_along(x, dims))) if mean else (SUM, None)
    return Number((call.ledger.term(out, kind, count, call.name, meaning),))
