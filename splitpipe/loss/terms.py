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
#: What a constant counts where nothing does: if nothing counts in the whole batch, it is there all the same.
NOTHING = 1e-20
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
    selected: bool = False  #: Whether a mask has selected what counts.
    asked: int = 0  #: How many conditions Python had asked before.
    divided: bool = True  #: Whether the value of a mean is its quotient, not its total.
    version: int | None = None  #: Of the value, when it was made.

    @property
    def weight(self) -> Amount:
        """The weight of the value, before the batch's count divides."""
        return self.count.here if self.count is not None and self.divided else 1.0


@dataclass(frozen=True, eq=False)
class Number:
    """A sum of terms; ``unknown``: where recognition of one ended, which counts like the mean next to it.

    ``asked``: how many conditions Python had asked in the end; ``empty``: if one of them was that nothing counts.
    """

    terms: tuple[Term, ...] = ()
    unknown: str = ""
    asked: int = 0
    empty: bool = False

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
        return self.changed(
            lambda term: replace(term, value=change(term.value)) if isinstance(term.value, Tensor) else term)

    def counted(self, rows: int) -> Number:
        """The number with constants as means, which count like its first mean, or rows; terms times 0 come last."""
        terms = tuple(sorted(self.terms, key=lambda term: not term.factor))
        if not any([term.kind is CONSTANT for term in terms]):
            return replace(self, terms=terms)
        counts = [term.count.value for term in terms if term.count is not None and term.factor]
        count = Count(counts[0] + NOTHING if counts else float(rows))
        return replace(self, terms=terms).changed(
            lambda term: replace(term, kind=MEAN, count=count) if term.kind is CONSTANT else term)


@dataclass(frozen=True)
class Unknown:
    """A number that isn't recognised beyond ``function``."""

    function: str


def unknown_function(number: Number | Unknown) -> str:
    """The function where recognition of a number, or of a part of it, ended; empty if all of it is recognised."""
    return number.function if isinstance(number, Unknown) else number.unknown


def by_rows(value: Tensor, rows: int) -> Number:
    """A number that counts as a mean over rows."""
    return Number((Term(value, MEAN, Count(float(rows))),))


def aligned(each: Sequence[Number]) -> list[list[Term]] | None:
    """For each term of the batch, those of all microbatches; None if these have different ones.

    A microbatch may have none where nothing counts (``if mask.any():``), if masks decide what counts in the others.
    """
    longest = max([number.live for number in each], key=len)
    apart = len({number.asked for number in each if number.live}) < 2  # Else they have run other code.
    counted = all([t.selected or t.count is not None and isinstance(t.count.value, Tensor) for t in longest])
    nothing = [replace(t, value=0.0, count=t.count and replace(t.count, value=0.0)) for t in longest] * counted
    rows = [number.live or nothing * number.empty for number in each]
    if any([len(row) != len(longest) for row in rows]):
        return None
    columns = [[*column] for column in zip(*rows)]
    return columns if all([_alike(column, apart) for column in columns]) else None


def _alike(column: Sequence[Term], apart: bool) -> bool:
    def kind(term: Term) -> tuple[Any, ...]:
        count = term.count and (term.count.more, term.count.least)
        return term.kind, term.function, term.selected, count, term.asked * apart

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


def combined(columns: Sequence[Sequence[Term]], like: Tensor, counts: Sequence[Amount | None] | None = None) -> Tensor:
    """The number of the batch, with the graphs of the microbatches' numbers, and the dtype and device of ``like``."""
    counts = [whole(column) for column in columns] if counts is None else counts
    result: Any = sum(part(term, like, count) for column, count in zip(columns, counts) for term in column)
    return result.to(like.dtype).reshape(like.shape) if isinstance(result, Tensor) else torch.full_like(like, result)


def part(term: Term, like: Tensor, count: Amount | None) -> Any:
    """A microbatch's part in a term of the batch, whose count this is."""
    value, weight = term.value, wide(term.weight, like)
    if isinstance(value, Tensor):
        value = value.to(like.device, torch.promote_types(value.dtype, torch.float32))  # A sum overflows sooner.
        if term.count is not None and term.divided:  # 0 / 0 has no part in the batch.
            if isinstance(weight, Tensor):
                value = torch.where((weight < NOTHING) & ~value.isfinite(), 0, value)
            elif weight < NOTHING:
                value = torch.where(value.isfinite(), value, 0)
    if count is not None:
        count = wide(count, like)
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
