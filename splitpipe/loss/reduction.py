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
from splitpipe.loss.terms import CONSTANT, SUM, Amount, Count, Number, Term, Unknown, wide


class Reduction:
    """Makes the loss of the batch from the losses of microbatches with these numbers of rows.

    The gradients of B are scaled by a gradient scaler's scale, if there is one.
    """

    def __init__(self, rows: Sequence[int], scale: Tensor | None) -> None:
        self._rows, self._scale = rows, scale
        self._losses: dict[int, Losses] = {}
        self._numbers: dict[int, Number] = {}
        self._first: tuple[int, list[Term] | None] | None = None  # The rows and terms of the first one; None: unknown.
        self._by_value: set[int] = set()  # Microbatches whose loss counts as one value.
        self._estimates: list[Amount | None] = []  # Of the terms' counts for the whole batch.

    def add(self, microbatch: int, losses: Losses) -> None:
        """Records the loss of a microbatch; if the first one isn't recognised, all count as means over rows."""
        number, rows = losses.number, self._rows[microbatch] if len(self._rows) > 1 else 1  # A batch may have no rows.
        first = None if self._first is None else self._first[1]
        if isinstance(number, Unknown) or self._first is not None and first is None:
            number = terms.by_rows(losses.value, rows) if first is None else self._like_first(losses.value, rows)
            self._by_value.add(microbatch)
        if self._first is None and number.live:
            self._first = rows, None if isinstance(losses.number, Unknown) else number.live
            self._estimates = [None] * len(number.live)
        for k, term in enumerate(number.live[: len(self._estimates)]):  # The first one may have none: max(0, 1).
            if self._estimates[k] is None:
                self._estimates[k] = self._estimate(term, microbatch)
        self._losses[microbatch], self._numbers[microbatch] = losses, number

    def _like_first(self, value: Tensor, rows: int) -> Number:
        """A loss that isn't recognised, after one that is: it counts as many as the first one, by rows."""
        assert self._first is not None and self._first[1] is not None
        many, like = rows / max(1, self._first[0]), self._first[1]
        each = [replace(t, value=0.0, divided=True, count=t.count and Count(t.count.here * many)) for t in like]
        k = next((k for k, term in enumerate(like) if term.count is not None), 0)
        each[k] = replace(each[k], value=value / each[k].factor)
        return Number(tuple(each))

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
        if microbatch not in self._by_value:
            return [self._seed(number.terms[k], k, microbatch) for k in losses.places]
        k = next(k for k, term in enumerate(number.terms) if isinstance(term.value, Tensor))
        seed = self._seed(replace(number.terms[k], factor=1.0), k, microbatch)
        if isinstance(losses.number, Unknown):  # Its only root is the loss.
            return [seed] * len(losses.places)
        roots = [losses.number.terms[k] for k in losses.places]
        each = [1.0 if t.count is None or t.divided else terms.divided_by(wide(t.count.here, seed)) for t in roots]
        return [torch.ones_like(t.value) * (seed / count * t.factor) for t, count in zip(roots, each)]  # type: ignore

    def _seed(self, term: Term, k: int, microbatch: int) -> Tensor:
        like = term.value if isinstance(term.value, Tensor) else self._losses[microbatch].value
        factor = term.weight(terms.shares(self._rows)[microbatch])
        estimate = self._estimates[k] if k < len(self._estimates) else None
        if term.kind is CONSTANT:  # With the correction, counts add up to 1; shares of rows may not.
            own = self._numbers[microbatch].terms
            base = next((j for j, each in enumerate(own) if each.count is not None and each.factor), None)
            if base is not None:
                factor, estimate = own[base].count.value, self._estimates[base]  # type: ignore[union-attr]
        factor = factor if estimate is None else wide(factor, like) / wide(estimate, like)
        factor = factor * term.factor
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
        like, rows = self._losses[order[0]].value, [self._rows[i] for i in order]
        each = [self._numbers[i] for i in order]
        columns = terms.aligned(each)
        # B has run backward term by term, so all microbatches must have the same terms.
        if columns is None or terms.partial(each) or not self._adds_up():
            raise ValueError(
                f"microbatches have losses of different kinds: {self._listed(order)}. Expected the same terms in each: "
                "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts, pass "
                "reduction='mean' (by rows) or 'sum', or use schedule=None and compute the loss from model(x)."
            )
        counts = [terms.whole(column) for column in columns]
        unit = self._correction(columns, counts, order, like)
        scale = None if self._scale is None else self._scale.reciprocal()
        if unit is not None and scale is not None:
            unit = unit * scale
        return terms.combined(columns, rows, like, counts), scale if unit is None else unit

    def _adds_up(self) -> bool:
        """True if the parts of a constant from which B has started add up to it."""
        started = any(
            isinstance(losses.number, Number) and losses.number.terms[k].kind is CONSTANT
            for losses in self._losses.values() for k in losses.places
        )
        counted = {any(t.count is not None for t in each.live) for each in self._numbers.values() if each.live}
        missing = any(not each.live for each in self._numbers.values())
        return not started or len(counted) < 2 and not (missing and False in counted)

    def _correction(
        self, columns: Sequence[Sequence[Term]], counts: Sequence[Amount | None], order: list[int], like: Tensor
    ) -> Tensor | None:
        units: list[Amount] = []
        for column, count, estimate in zip(columns, counts, self._estimates):
            if count is not None and estimate is not None:
                units.append(_quotient(wide(estimate, like), wide(count, like)))
            elif column[0].kind is SUM:
                units.append(1.0)
        if len(units) > 1 and not _equal(units):
            raise ValueError(
                f"the loss has several terms whose counts aren't proportional: {self._listed(order)}. A schedule "
                "runs backward before all counts are known, and corrects all gradients by one factor. Expected terms "
                "with one count: let loss_fn return a pair (total, count), pass reduction='mean' (by rows), or use "
                "schedule=None and compute the loss from model(x)."
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
