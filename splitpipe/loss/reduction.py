"""The batch's loss with a schedule, where B starts before the counts of later microbatches are known.

    term     gradient that microbatch i starts from    of the batch
    a sum    1                                         1
    a mean   count_i / n                               count_i / sum of counts

n is an estimate of the sum, from the first microbatch that runs backward. The gradients are also multiplied by a
gradient scaler's scale. In the end, they are multiplied by the correction of both. There is only one correction, so
several terms must have proportional counts.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitpipe.loss import terms
from splitpipe.loss.objective import Losses
from splitpipe.loss.terms import Amount, Count, Number, Term, Unknown, wide

_WAYS = (
    "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts, pass "
    "reduction='mean' (by rows) or 'sum', or use schedule=None and compute the loss from model(x)."
)


class Reduction:
    """Makes the loss of the batch from the losses of microbatches with these numbers of rows.

    The gradients of B are scaled by a gradient scaler's scale, if there is one.
    """

    def __init__(self, rows: Sequence[int], scale: Tensor | None) -> None:
        self._rows, self._scale = rows, scale
        self._losses: dict[int, Losses] = {}
        self._numbers: dict[int, Number] = {}
        self._first: tuple[int, Number | Unknown] | None = None  #: The rows and loss of the first one with terms.
        self._estimates: list[Amount | None] = []  #: Of the terms' counts for the whole batch.

    def add(self, microbatch: int, losses: Losses) -> None:
        """Records the loss of a microbatch; if the first one isn't recognised, all count as means over rows."""
        number, rows = losses.number, self._rows[microbatch] if len(self._rows) > 1 else 1  # A batch may have no rows.
        first_rows, first = self._first or (rows, number)
        if isinstance(first, Unknown):
            number = terms.by_rows(losses.value, rows)
        elif isinstance(number, Unknown):  # It counts as many as the first one, by rows.
            many = rows / max(1, first_rows)
            each = [
                replace(t, value=0.0, divided=True, count=t.count and Count(t.count.here * many)) for t in first.live]
            number = Number((replace(each[0], value=losses.value / each[0].factor), *each[1:]))
        if self._first is None and number.live:
            self._first = rows, losses.number
            self._estimates = [self._estimate(term, microbatch) for term in number.live]
        self._losses[microbatch], self._numbers[microbatch] = losses, number

    def _estimate(self, term: Term, microbatch: int) -> Amount | None:
        if term.count is None:
            return None
        here, grown = term.count.here, sum(self._rows) / max(1, self._rows[microbatch])
        if isinstance(here, Tensor):
            return torch.where(here == 0, sum(self._rows), here * grown)
        return here * grown or 1.0

    def seeds(self, microbatch: int) -> list[Tensor]:
        """The gradients that a microbatch's backward starts from, one per root."""
        losses, number = self._losses[microbatch], self._numbers[microbatch]
        if number is losses.number:
            return [self._seed(number.terms[k], k, losses.value) for k in losses.places]
        seed = self._seed(replace(number.terms[0], factor=1.0), 0, losses.value)  # Of the loss.
        if isinstance(losses.number, Unknown):  # Its only root.
            return [seed] * len(losses.places)
        roots = [losses.number.terms[k] for k in losses.places]
        each = [1.0 if t.count is None or t.divided else terms.divided_by(wide(t.count.here, seed)) for t in roots]
        return [torch.ones_like(t.value) * (seed / count * t.factor) for t, count in zip(roots, each)]  # type: ignore

    def _seed(self, term: Term, k: int, value: Tensor) -> Tensor:
        like = term.value if isinstance(term.value, Tensor) else value
        factor, estimate = term.weight, self._estimates[k] if k < len(self._estimates) else None
        factor = (factor if estimate is None else wide(factor, like) / wide(estimate, like)) * term.factor
        if isinstance(factor, Tensor):
            seed = factor.to(like.device, like.dtype)
            if type(like) is not Tensor or seed.shape != like.shape:  # A DTensor's seed is one too.
                seed = torch.ones_like(like) * seed
        else:
            seed = torch.full_like(like, factor)
        return seed if self._scale is None else seed * self._scale.to(seed.dtype)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and the factor for the gradients (None: 1)."""
        order = sorted(self._numbers)
        like, columns = self._losses[order[0]].value, terms.aligned([self._numbers[i] for i in order])
        if columns is None:  # B has run backward term by term.
            raise ValueError(
                f"microbatches have losses of different kinds: {self._listed(order)}. Expected the same terms in each: "
                f"{_WAYS}"
            )
        counts = [terms.whole(column) for column in columns]
        unit = self._correction(columns, counts, order, like)
        scale = None if self._scale is None else self._scale.reciprocal()
        if unit is not None and scale is not None:
            unit = unit * scale
        return terms.combined(columns, like, counts), scale if unit is None else unit

    def _correction(
        self, columns: Sequence[Sequence[Term]], counts: Sequence[Amount | None], order: list[int], like: Tensor
    ) -> Tensor | None:
        units = [
            1.0 if count is None or estimate is None else _quotient(wide(estimate, like), wide(count, like))
            for count, estimate in zip(counts, self._estimates)
        ]
        if len(units) > 1 and not _equal(units):
            raise ValueError(
                f"the loss has several terms whose counts aren't proportional: {self._listed(order)}. A schedule "
                "runs backward before all counts are known, and corrects all gradients by one factor. Expected terms "
                f"with one count: {_WAYS}"
            )
        if not units or not isinstance(units[0], Tensor) and math.isclose(units[0], 1, rel_tol=1e-9):
            return None
        dtype = torch.promote_types(like.dtype, torch.float32)
        if isinstance(units[0], Tensor):
            return units[0].to(like.device, dtype)
        return torch.full((), units[0], dtype=dtype, device=like.device)  # The host doesn't wait for it.

    def _listed(self, order: Sequence[int]) -> str:
        """The terms of the loss, with their counts in each microbatch."""
        counts: dict[str, list[str]] = {}
        for i in order:
            for k, term in enumerate(self._numbers[i].terms):
                count = "a sum" if term.count is None else f"{float(term.count.here):g}"
                counts.setdefault(f"term {k} ({term.function or 'a sum'})", []).append(count)
        return "; ".join(f"{name} has the counts {', '.join(each)}" for name, each in counts.items())


def _quotient(above: Amount, below: Amount) -> Amount:
    if isinstance(below, Tensor):
        return torch.where(below == 0, 1, above / terms.divided_by(below))
    return above / below if below else 1.0


def _equal(units: Sequence[Amount]) -> bool:
    """True if all are equal. If some are tensors, the host waits for them, which only happens for several terms."""
    if all(unit is units[0] for unit in units):
        return True
    numbers = [float(unit) for unit in units]
    return all(math.isclose(number, numbers[0], rel_tol=1e-4) for number in numbers)
