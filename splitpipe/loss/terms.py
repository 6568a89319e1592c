"""The terms of which a batch's number consists, and how the microbatches' numbers make that of the batch.

    term        of a microbatch     of the batch
    SUM         total_i             sum of total_i
    MEAN        total_i / count_i   sum of total_i / sum of count_i
    CONSTANT    c                   c: a penalty on weights, for example

A number is a sum of terms, each times a factor. A constant may also be divided by a count, and a count may have an
added number, or a minimum: (total_i + c) / max(count_i + more, least). For the batch, these apply once.

A microbatch with the count 0 may have a total, such as that of all rows divided by the number of some. The trace makes
it total_i / 1.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

SUM, MEAN, CONSTANT = "sum", "mean", "constant"
Amount = Tensor | float
#: In place of a number of conditions, for a term from before the first one: every microbatch makes it.
BEFORE = -1


@dataclass(frozen=True, eq=False)
class Divisor:
    """The divisor of a term in a microbatch: ``max(count + more, least)``; only the count grows with the rows."""

    count: Amount
    more: Amount = 0.0
    least: Amount | None = None
    source: object = None  # The number from which it was made.
    safe: bool = False  # True if the quotient is 0 where the divisor is 0: nan_to_num.

    @property
    def here(self) -> Amount:
        """The divisor in the microbatch."""
        return _at_least(self.count if _zero(self.more) else self.count + self.more, self.least)

    def shifted(self, by: float) -> Divisor:
        """The divisor plus a number."""
        least = None if self.least is None else self.least + by
        return Divisor(self.count, self.more + by, least, self.source, self.safe)

    @property
    def grown(self) -> Divisor:
        """The divisor, if what was added to it counts, too: it differs between microbatches."""
        return replace(self, count=self.count + self.more, more=0.0)

    def times(self, by: float) -> Divisor:
        """The divisor times a positive number."""
        least = None if self.least is None else self.least * by
        return Divisor(self.count * by, self.more * by, least, self.source, self.safe)


#: Where a count that Python has read is 0: the 1 of max(n, 1), unless other microbatches divide by 1, too.
NONE = Divisor(0.0, least=1.0)

#: The source of a divisor that equals a size, but may be a constant.
GUESS = "a number"
#: The source of what isn't a divisor: the product or quotient of a size and a number that was read.
RATIO = "a ratio"


@dataclass(frozen=True, eq=False)
class Term:
    """One part of a number, made by ``function``; if it is ``unknown``, ``function`` is where tracing failed."""

    value: Amount
    kind: str
    divisor: Divisor | None = None
    factor: float = 1.0
    function: str = ""
    version: int | None = None  # Of the value, when it was made.
    unknown: bool = False
    #: How many conditions Python had read before, or BEFORE: their answers decide which microbatches have the term.
    asked: int = 0
    #: If it was multiplied by what may be a constant, not 1 / count: the sum, with a factor besides the term's own.
    doubt: Term | None = None

    def detached(self) -> Term:
        """The term without its graph."""
        value = self.value.detach() if isinstance(self.value, Tensor) else self.value
        return replace(self, value=value, doubt=self.doubt and self.doubt.detached())


@dataclass(frozen=True, eq=False)
class Number:
    """A sum of terms.

    ``rows``: the rows whose individual numbers were added up in it. A number with a minimum can only be a divisor.
    ``asked``: how many conditions Python had read in the end. ``figures``: see ``Facts.figures``.
    """

    terms: tuple[Term, ...]
    rows: frozenset[int] = frozenset()
    least: Amount | None = None
    asked: int = 0
    figures: tuple[Any, ...] = ()

    def scaled(self, factor: float) -> Number:
        """The number times a factor, which is positive if the number has a minimum."""
        least = None if self.least is None else self.least * factor
        return replace(self, terms=tuple([replace(t, factor=t.factor * factor) for t in self.terms]), least=least)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Number:
        """The number, which isn't computed with any more, with other tensors as its terms' values."""
        return replace(self, terms=tuple([
            replace(term, value=change(term.value), doubt=None) if isinstance(term.value, Tensor) else term
            for term in self.terms
        ]))

    def detached(self) -> Number:
        """The number without its graph."""
        return replace(self, terms=tuple([term.detached() for term in self.terms]))


@dataclass(frozen=True, eq=False)
class Shifted:
    """Values with rows, to all of which a number was added: ``by``, a tensor that isn't written to."""

    number: Number
    by: Tensor


@dataclass(frozen=True)
class Unknown:
    """A number that could not be traced beyond ``function``."""

    function: str


def by_rows(value: Tensor, rows: int, function: str = "") -> Number:
    """A number that counts as a mean over rows."""
    return Number((Term(value, MEAN, Divisor(float(rows)), 1.0, function, unknown=bool(function)),))


def not_understood(made: Number | Unknown | None) -> str:
    """The function where tracing a number, or a part of it, failed; empty if none did."""
    if isinstance(made, Unknown):
        return made.function
    return next((term.function for term in made.terms if term.unknown), "") if made is not None else ""


def differing(figures: Sequence[tuple[Any, ...]]) -> str:
    """What Python has computed from microbatches, given the figures of each; empty if they are the same."""
    alike = len({len(found) for found in figures}) > 1 or len({*figures}) < 2  # Else they met other conditions.
    return "" if alike else "a number that Python has computed from the batch"


def divided(number: Number) -> Divisor | None:
    """A number as a divisor; None if it isn't a sum, or has a gradient."""
    found: dict[str, Amount] = {}
    for term in number.terms:
        if term.divisor is not None or isinstance(term.value, Tensor) and term.value.requires_grad:
            return None  # The gradient would depend on the whole batch's divisor.
        amount = term.value if term.factor == 1 else term.value * term.factor
        kind = SUM if term.kind is SUM else CONSTANT
        found[kind] = found[kind] + amount if kind in found else amount
    return Divisor(found[SUM], found.get(CONSTANT, 0.0), number.least, number) if SUM in found else None


def aligned(each: Sequence[Number]) -> list[list[Term]] | None:
    """For each term of the batch, those of all microbatches; None if microbatches consist of different terms."""
    if any(number.least is not None for number in each):
        return None
    kept = _by_condition(each)
    if kept is None:
        return None
    if not _alike(kept):  # A part that is 0 times something doesn't count.
        kept = [tuple([term for term in terms if term.factor]) for terms in kept]
        full = max(kept, key=len)
        kept = [terms or tuple([_nothing(term, number) for term in full]) for terms, number in zip(kept, each)]
    if len({len(terms) for terms in kept}) > 1:
        return None
    columns = [list(column) for column in zip(*kept)]
    for k, column in enumerate(columns):
        dividing = [term for term in column if term.divisor is not None]
        if any(term.kind is SUM for term in column) and all(term.divisor is NONE for term in dividing):
            column = columns[k] = [replace(t, kind=SUM, divisor=None) if t.divisor is NONE else t for t in column]
        elif dividing and len(dividing) < len(column):
            # max(n, 1) is the plain number 1 if n is 0: nothing counts there.
            if not all(term.divisor is not None or _nil(term.value) for term in column):
                return None
            column = columns[k] = [term if term.divisor is not None else _uncounted(term) for term in column]
        makers = {term.function for term in column if not term.unknown} - {""}
        alike = len({term.kind for term in column}) == 1 and len(makers) < 2
        if not alike or not _same([term.factor for term in column]):
            return None
        added = _added(column)
        if not _same(added):
            if not all(float(by).is_integer() for by in added):
                return None
            columns[k] = [replace(term, divisor=term.divisor and term.divisor.grown) for term in column]
    return columns


def conditional(each: Sequence[Number]) -> bool:
    """True if microbatches have evaluated the same conditions, and have terms after different ones; some have none."""
    each = [number for number in each if number.terms]
    if len({number.asked for number in each}) > 1:
        return False
    found = zip(*[[term.asked for term in number.terms] for number in each])
    return len({len(number.terms) for number in each}) > 1 or any(len({*asked} - {0}) > 1 for asked in found)


def sharing(each: Sequence[Number]) -> bool:
    """True if all microbatches or none have counts, so that the parts of a constant add up to it."""
    return len({not number.terms or any(term.divisor is not None for term in number.terms) for number in each}) < 2


def _by_condition(each: Sequence[Number]) -> list[tuple[Term, ...]] | None:
    """The terms of each microbatch: if a condition wasn't met, a term that counts nothing."""
    if not conditional(each):
        return [number.terms for number in each]
    found: list[list[Term]] = [[] for _ in each]
    for asked in sorted({term.asked for number in each for term in number.terms}):
        parts = [[term for term in number.terms if term.asked == asked] for number in each]
        full = max(parts, key=len)
        if any((part or asked == BEFORE) and len(part) < len(full) for part in parts):
            return None
        for own, part, number in zip(found, parts, each):
            own += part or [_nothing(term, number) for term in full]
    return [tuple(own) for own in found]


def _nil(value: Amount) -> bool:
    return not value.any().item() if isinstance(value, Tensor) else value == 0


def _alike(each: Sequence[tuple[Term, ...]]) -> bool:
    return len({tuple([(term.kind, term.factor == 0) for term in terms]) for terms in each}) == 1


def _nothing(like: Term, number: Number) -> Term:
    if like.kind is CONSTANT and like.divisor is None:
        return like  # Its part for each microbatch is a part of the whole.
    # The value keeps its graph, through which a gradient of 0 runs.
    value = number.terms[0].value if number.terms else 0.0
    value = _zero_of(value) if isinstance(value, Tensor) else 0.0
    if like.divisor is None:
        return Term(value, like.kind, None, like.factor, like.function)
    return Term(value, MEAN, Divisor(0.0), like.factor, like.function)


def _uncounted(term: Term) -> Term:
    return Term(0.0 if isinstance(term.value, float) else term.value, MEAN, Divisor(0.0), term.factor, term.function)


def _zero_of(value: Tensor) -> Tensor:
    """0 with the value's graph, even if the value isn't finite."""
    return torch.where(torch.ones((), dtype=torch.bool, device=value.device), 0, value)


def _added(column: Sequence[Term]) -> list[float]:
    """What is added to counts, where these aren't 0."""
    divisors = [term.divisor for term in column if term.divisor is not None]
    return [x.more for x in divisors if isinstance(x.more, (int, float)) and not _zero(x.count)]


def _same(factors: Sequence[float]) -> bool:
    return all(math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors)


def whole(column: Sequence[Term]) -> Amount | None:
    """The divisor of a term for the batch, if it has one."""
    divisors = [term.divisor for term in column if term.divisor is not None]
    if not divisors:
        return None
    device = next((term.value.device for term in column if isinstance(term.value, Tensor)), None)
    counts = [divisor.count for divisor in divisors]
    count = _stacked(counts, device).sum() if any(isinstance(x, Tensor) for x in counts) else sum(counts)
    # These may be missing in a microbatch where nothing counts.
    largest = max(divisors, key=lambda divisor: divisor.least is not None)
    more = next((divisor.more for divisor in divisors if not _zero(divisor.more)), 0.0)
    count = count if _zero(more) else count + _moved(more, device)
    count = divided_by(count) if any(divisor.safe for divisor in divisors) else count
    return _at_least(count, _moved(largest.least, device))


def _stacked(amounts: Sequence[Amount], device: torch.device | None) -> Tensor:
    # torch.full() makes the device fill it; torch.as_tensor() would wait for a copy from the host.
    return torch.stack([
        x.to(device) if isinstance(x, Tensor) else torch.full((), float(x), device=device) for x in amounts
    ])


def weight(term: Term, share: float) -> Amount:
    """The weight of a microbatch's term, before division by the whole batch's divisor."""
    if term.kind is SUM:
        return 1.0
    if term.kind is CONSTANT:
        return share
    assert term.divisor is not None
    return term.divisor.here


def divided_by(count: Amount) -> Amount:
    """What a microbatch's total has been divided by, given its count."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1.0


def combined(
    columns: Sequence[Sequence[Term]], rows: Sequence[int], like: Tensor,
    divisors: Sequence[Amount | None] | None = None,
) -> Tensor:
    """The number of the batch, with the graphs of the microbatches' numbers, and the dtype and device of ``like``."""
    divisors = [whole(column) for column in columns] if divisors is None else divisors
    result: Any = sum(_total(column, rows, divisor, like.device) for column, divisor in zip(columns, divisors))
    if not isinstance(result, Tensor):
        return torch.full_like(like, result)
    found: Tensor = result.to(like.dtype).reshape(like.shape)
    return found


def _total(column: Sequence[Term], rows: Sequence[int], divisor: Amount | None, device: torch.device) -> Any:
    """A term of the batch; if microbatches are alike, the number of operations doesn't depend on how many there are."""
    values: list[Any] = [_moved(term.value, device) for term in column]
    weights = [weight(term, share) for term, share in zip(column, shares(rows))]
    counted = any(isinstance(x, Tensor) for x in weights)
    alike = all(type(x) is Tensor for x in values) and len({(x.dtype, x.shape) for x in values}) == 1
    if not alike or not counted and len(set(weights)) > 1:
        return sum(_moved(_weighted(term, x, part, divisor), device) for term, x, part in zip(column, values, weights))
    value = torch.stack(values)
    value = value.to(torch.promote_types(value.dtype, torch.float32))  # A sum overflows sooner than its parts.
    if counted:
        counts = _stacked(weights, device)
        return _weighted(column[0], value, counts.reshape(-1, *[1] * (value.dim() - 1)), divisor).sum(0)
    return _weighted(column[0], value.sum(0), weights[0], divisor)


def shares(rows: Sequence[int]) -> list[float]:
    """Each microbatch's fraction of the batch."""
    total = sum(rows)
    return [count / total if total else 1 / len(rows) for count in rows]


def part(term: Term, share: float, divisor: Amount | None) -> Any:
    """A microbatch's part in a term of the batch; the microbatch is ``share`` of the batch."""
    return _weighted(term, term.value, weight(term, share), divisor)


def _weighted(like: Term, value: Amount, weight: Amount, divisor: Amount | None) -> Any:
    if isinstance(value, Tensor):
        weight, divisor = wide(weight, value), None if divisor is None else wide(divisor, value)
        if like.kind is MEAN and isinstance(weight, Tensor):
            value = torch.where((weight == 0) & ~value.isfinite(), 0, value)  # 0 / 0 has no part in it.
            weight = divided_by(weight)
        elif like.kind is MEAN and weight == 0:
            value = _zero_of(value)
    if divisor is not None:
        weight = weight / divisor if isinstance(divisor, Tensor) or divisor else math.nan
    return value * (weight if like.factor == 1 else weight * like.factor)


def wide(amount: Amount, like: Tensor) -> Amount:
    """An amount on a value's device, in its dtype or float32: counts are integers, but their quotients aren't."""
    if not isinstance(amount, Tensor):
        return amount
    return amount.to(like.device, torch.promote_types(like.dtype, torch.float32))


def _at_least(amount: Amount, least: Amount | None) -> Amount:
    if least is None:
        return amount
    if isinstance(amount, Tensor):
        return torch.clamp(amount, min=least)
    return torch.clamp(least, min=amount) if isinstance(least, Tensor) else max(amount, least)


def _moved(amount: Any, device: torch.device | None) -> Any:
    return amount.to(device) if isinstance(amount, Tensor) and device is not None else amount


def _zero(amount: Amount) -> bool:
    return not isinstance(amount, Tensor) and amount == 0


def few_digits(value: float) -> bool:
    """True for a number with one or two digits besides zeros."""
    return math.isclose(float(f"{value:.2g}"), value, rel_tol=1e-12)
