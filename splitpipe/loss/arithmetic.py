"""Rules for sums, products, quotients and means: what they make of numbers of the batch."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import version_of
from splitpipe.loss.function_call import FunctionCall, size_along
from splitpipe.loss.ledger import (
    GIVEN,
    MAY_COUNT,
    VARIED,
    Constant,
    Inverse,
    Least,
    Ledger,
    Meaning,
    Rows,
    Stack,
)
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
    ledger, args = call.ledger, call.args
    meanings = [ledger.of(x) for x in args]
    if not any(isinstance(each, Number) for each in meanings) or any(isinstance(each, Rows) for each in meanings):
        rows = next((each for each in meanings if isinstance(each, Unknown)), None) or call.joined()
        return None if isinstance(rows, Rows) and rows.share is not None else rows
    alpha = call.kwargs.get("alpha", 1)
    if "alpha" in call.kwargs and ledger.doubt(alpha):
        return Unknown(MAY_COUNT)
    signs = [-alpha, 1] if call.name == "rsub" else [1, -alpha if "sub" in call.name else alpha]
    terms: list[Term] = []
    unknown = ""
    for x, meaning, sign in zip(args, meanings, signs):
        number = meaning if isinstance(meaning, Number) else _as_number(call, x, meaning)
        if not isinstance(number, Number):
            return number
        terms += number.scaled(sign).terms
        unknown = unknown or number.unknown
    if terms and all(term.kind is SUM for term in terms):
        return Number((ledger.term(call.out, SUM, function=terms[0].function),))
    return Number(tuple(terms), unknown=unknown) if call.out.numel() == 1 or len(terms) < 2 else None


def _as_number(call: FunctionCall, x: Any, meaning: Meaning) -> Number | Unknown | None:
    """A constant next to a number, or a number that isn't recognised."""
    value = call.number(x)
    if isinstance(meaning, Unknown) and x.numel() == 1:
        others = [term.count for y in call.args for term in getattr(call.ledger.of(y), "terms", ())]
        count = next((each for each in others if each is not None), Count(float(call.ledger.rows)))
        return Number((call.ledger.term(x, MEAN, count, meaning.function),), unknown=meaning.function)
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
    above, below = call.args if len(call.args) == 2 else (1.0, call.args[0])
    above, below = (below, above) if call.name in ("rdiv", "rtruediv") else (above, below)
    by, value = call.ledger.of(below), call.number(above)
    counts = isinstance(by, Least) or isinstance(by, Number) and by.terms
    if not counts or below.numel() > 1:  # type: ignore[union-attr]
        return _scaled(call, above, below, -1) or _entries(call)
    count = by.count if isinstance(by, Least) else count_of(by)
    if count is None or value is None:
        return None if count is None else _over(call.ledger.of(above), count)
    return Unknown(MAY_COUNT) if call.ledger.doubt(value) > 1 else Inverse(float(value), count)


def count_of(meaning: Meaning) -> Count | None:
    """A number as a count; None if it isn't a sum, or has a gradient, which would depend on the whole batch's count."""
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
    if isinstance(meaning, Inverse) and power > 0:
        quotient = _over(by, meaning.count)
        return quotient.scaled(meaning.above) if isinstance(quotient, Number) else quotient
    if not isinstance(meaning, Number) or not isinstance(by, Constant) or by.made or not meaning.terms:
        return None
    if call.out.numel() > 1:
        return call.in_vector(meaning)
    factor = y if power > 0 else y.reciprocal()
    return meaning.changed(lambda term: _by_tensor(term, factor))


def _by_tensor(term: Term, factor: Tensor) -> Term:
    """A term times a constant, which may want a gradient: not one of 0 / 0."""
    value, count = term.value, None if term.count is None or not term.divided else term.count.here
    if isinstance(value, Tensor) and count is not None:
        nothing = count == 0 if isinstance(count, Tensor) else torch.full_like(value, not count, dtype=torch.bool)
        value = torch.where(nothing, 0, value)
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
        return meaning.scaled(factor) if x.numel() == 1 else call.in_vector(meaning)
    if isinstance(meaning, Inverse):
        return replace(meaning, above=meaning.above * factor)
    if not isinstance(meaning, Constant) or doubt > 1 and x.requires_grad:
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
        return meaning if x.numel() == 1 else call.in_vector(meaning)
    dims = call.dims() or [0]  # Of a single row.
    if isinstance(meaning, Constant):
        if not mean and meaning.made and 0 in dims and meaning.value != 0 and x.dim() and not len(x) % call.ledger.rows:
            return Unknown(MAY_COUNT)  # torch.ones_like(output).sum()
        if meaning.value is None:
            return VARIED if meaning.made else GIVEN
        return Constant(True, True, meaning.value if mean else meaning.value * size_along(x, dims))
    if not isinstance(meaning, Rows) or 0 not in dims:
        return meaning if isinstance(meaning, Rows) else None
    if meaning.doubt > mean:
        return Unknown(MAY_COUNT)
    if meaning.share is not None:
        return None if mean else Number((call.ledger.term(out, MEAN, meaning.share, call.name),))
    name = f"{call.name} of a selection" if meaning.chosen is not None else call.name
    if mean:
        return Number((call.ledger.term(out, MEAN, Count(size_along(x, dims)), name),))
    return Number((call.ledger.term(out, SUM, function=A_COUNT if meaning.mask or x.dtype == torch.bool else name),))


#: The function of a sum of a mask.
A_COUNT = "a count"
