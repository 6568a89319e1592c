"""The terms of which a batch's number consists, and how the microbatches' numbers make that of the batch.

    term        of a microbatch     of the batch
    SUM         total_i             sum of total_i
    MEAN        total_i / count_i   sum of total_i / sum of count_i
    CONSTANT    c                   c: a penalty on weights, for example

A number is a sum of terms, each times a factor. The value of a mean is its total where possible: 0 / 0, of a
microbatch in which nothing counts, then never reaches gradients.
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


@dataclass(frozen=True, eq=False)
class Count:
    """What a mean divides by in a microbatch: ``max(value + more, least)``; only the value grows with the rows."""

    value: Amount
    more: float = 0.0
    least: float | None = None

    @property
    def here(self) -> Amount:
        """The count of the microbatch."""
        return self.of(self.value)

    def of(self, value: Amount) -> Amount:
        """The count of a batch with this value."""
        count = value + self.more if self.more else value
        if self.least is None:
            return count
        return count.clamp(min=self.least) if isinstance(count, Tensor) else max(count, self.least)


@dataclass(frozen=True, eq=False)
class Term:
    """One part of a number, made by ``function``."""

    value: Amount
    kind: str
    count: Count | None = None
    factor: float = 1.0
    function: str = ""
    divided: bool = True  #: Whether the value of a mean is its quotient, not its total.
    asked: int = 0  #: How many conditions Python had asked before: their answers decide who has the term.
    version: int | None = None  #: Of the value, when it was made.

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Term:
        """The term with another tensor as its value."""
        return replace(self, value=change(self.value)) if isinstance(self.value, Tensor) else self

    def weight(self, share: float) -> Amount:
        """The weight of the value in a batch of which the microbatch is a share, before the batch's count divides."""
        if self.count is None:
            return share if self.kind is CONSTANT else 1.0
        return self.count.here if self.divided else 1.0


@dataclass(frozen=True, eq=False)
class Number:
    """A sum of terms; ``asked``: the conditions that Python had asked in the end, True if they decide for the batch.

    ``unknown``: the function where recognition of some terms ended, which count like the mean next to them, or as rows.
    """

    terms: tuple[Term, ...] = ()
    asked: tuple[bool, ...] = ()
    unknown: str = ""

    @property
    def live(self) -> list[Term]:
        """The terms that aren't multiplied by 0."""
        return [term for term in self.terms if term.factor]

    def changed(self, change: Callable[[Term], Term]) -> Number:
        """The number with other terms."""
        return replace(self, terms=tuple([change(term) for term in self.terms]))

    def scaled(self, factor: float) -> Number:
        """The number times a factor."""
        return self.changed(lambda term: replace(term, factor=term.factor * factor))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Number:
        """The number with other tensors as its terms' values."""
        return self.changed(lambda term: term.mapped(change))


@dataclass(frozen=True)
class Unknown:
    """A number that isn't recognised beyond ``function``."""

    function: str


def unknown_function(number: Number | Unknown | None) -> str:
    """The function where recognition of a number, or of a part of it, ended; empty if all of it is recognised."""
    if number is None:
        return ""
    return number.function if isinstance(number, Unknown) else number.unknown


def by_rows(value: Tensor, rows: int) -> Number:
    """A number that counts as a mean over rows."""
    return Number((Term(value, MEAN, Count(float(rows))),))


def aligned(each: Sequence[Number]) -> list[list[Term]] | None:
    """For each term of the batch, those of all microbatches; None if these have different ones.

    A microbatch may lack the terms after a condition (``if mask.any():``) of which others decide: nothing counts there.
    """
    apart = len({len(number.asked) for number in each if number.live}) < 2
    columns: list[list[Term]] = []
    for asked in sorted({term.asked * apart for number in each for term in number.live}):
        parts = [[term for term in number.live if not apart or term.asked == asked] for number in each]
        longest = max(parts, key=len)
        for number, part in zip(each, parts):
            undecided = number.asked[:asked][-1:] == (False,) if number.live else False in number.asked
            if len(part) < len(longest) and (part or not undecided):
                return None
        rows = zip(*[part or [*map(_nothing, longest)] for part in parts])
        columns += [_without_least([*column], each) for column in rows]
    return columns if all(map(_alike, columns)) else None


def _without_least(column: list[Term], each: Sequence[Number]) -> list[Term]:
    """The column with nothing in place of a 0 that Python has divided by 1, as by max(n, 1), where others have n."""
    like = next((term for term in column if term.count is not None), None)
    return column if like is None else [
        _nothing(like) if term.kind is SUM and False in number.asked and isinstance(term.value, Tensor)
        and not term.value.any().item() else term for term, number in zip(column, each)
    ]


def partial(each: Sequence[Number]) -> bool:
    """True if some microbatches have only some of the terms."""
    each = [number for number in each if number.live]
    return len({len(number.live) for number in each}) > 1 or len({len(number.asked) for number in each}) < 2 and (
        len({tuple([term.asked for term in number.live]) for number in each}) > 1
    )


def _nothing(like: Term) -> Term:
    if like.kind is CONSTANT:
        return like  # Its part for each microbatch is a part of the whole.
    return replace(like, value=0.0, count=like.count and replace(like.count, value=0.0))


def _alike(column: Sequence[Term]) -> bool:
    def kind(term: Term) -> tuple[Any, ...]:
        count = term.count
        return term.kind, term.function, None if count is None else (count.more, count.least)

    first = column[0]
    return all(kind(term) == kind(first) and math.isclose(term.factor, first.factor, rel_tol=1e-6) for term in column)


def whole(column: Sequence[Term]) -> Amount | None:
    """The count of a term for the batch, if it has one."""
    first = column[0].count
    if first is None:
        return None
    counts: list[Any] = [term.count.value for term in column if term.count is not None]
    device = next((x.device for x in counts if isinstance(x, Tensor)), None)
    return first.of(sum(x.detach().to(device).reshape(()) if isinstance(x, Tensor) else x for x in counts))


def combined(
    columns: Sequence[Sequence[Term]], rows: Sequence[int], like: Tensor, counts: Sequence[Amount | None] | None = None
) -> Tensor:
    """The number of the batch, with the graphs of the microbatches' numbers, and the dtype and device of ``like``."""
    counts = [whole(column) for column in columns] if counts is None else counts
    result: Any = sum(
        part(term.mapped(lambda x: x.to(like.device)), share, count)
        for column, count in zip(columns, counts) for term, share in zip(column, shares(rows))
    )
    if not isinstance(result, Tensor):
        return torch.full_like(like, result)
    return result.to(like.dtype).reshape(like.shape)


def shares(rows: Sequence[int]) -> list[float]:
    """Each microbatch's fraction of the batch."""
    total = sum(rows)
    return [count / total if total else 1 / len(rows) for count in rows]


def part(term: Term, share: float, count: Amount | None) -> Any:
    """A microbatch's part in a term of the batch, whose count this is; the microbatch is ``share`` of the batch."""
    value, weight = term.value, term.weight(share)
    if isinstance(value, Tensor):
        value = value.to(torch.promote_types(value.dtype, torch.float32))  # A sum overflows sooner than its parts.
        weight, count = wide(weight, value), None if count is None else wide(count, value)
        if term.count is not None and term.divided:  # 0 / 0 has no part in the batch.
            if isinstance(weight, Tensor):
                value = torch.where((weight < 1e-20) & ~value.isfinite(), 0, value)
            elif weight < 1e-20:
                value = torch.where(value.isfinite(), value, 0)
    if count is not None:
        weight = weight / count if isinstance(count, Tensor) or count else math.nan
    return value * (weight if term.factor == 1 else weight * term.factor)


def divided_by(count: Amount) -> Amount:
    """The count, or 1 in place of 0."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1.0


def wide(amount: Amount, like: Tensor) -> Amount:
    """An amount on a value's device, in its dtype or float32: counts are integers, but their quotients aren't."""
    if not isinstance(amount, Tensor):
        return amount
    return amount.to(like.device, torch.promote_types(like.dtype, torch.float32))
