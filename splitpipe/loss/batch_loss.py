"""The batch's loss with a schedule, where B starts before the counts of later microbatches are known.

B starts from a microbatch's part of the loss, with estimates in place of the batch's counts. In the end, all gradients
are multiplied by the quotient of what counts and estimates make of the loss, and divided by a gradient scaler's scale.
There is only one such correction, so several sums and means must have proportional counts. What is added to them, such
as a penalty, is in the part of the last microbatch, where the correction is known.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import numbers, views
from splitpipe.loss.numbers import CONSTANT, DIVIDING, MEAN, SCALING, SUM, Amount, Atom, Instruction, Number, Unknown
from splitpipe.loss.rules import RULES

_WAYS = (
    "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts, pass "
    "reduction='mean' (by rows) or 'sum', or use schedule=None and compute the loss from model(x)."
)
#: Functions that add nothing.
_SCALES = SCALING | DIVIDING | {"neg", "negative", "dot"}


class BatchLoss:
    """Makes the loss of the batch from those of microbatches with these numbers of rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows if len(rows) > 1 else [1]  # A batch may have no rows.
        self._numbers: dict[int, Number] = {}
        self._by_rows: bool | None = None  #: Whether all are means over rows, since the first one isn't recognised.
        self._live: list[bool] = []  #: Whether each atom is a sum or mean with a graph.
        self._estimates: list[Any] = []  #: Of the batch: the counts of what is live, and the values of other atoms.
        self._last: int | None = None  #: The last microbatch, when all are known.
        self._same: list[Number] = []  #: Then, those that count anything.
        self._like: Any = None

    def part(
        self, i: int, value: Tensor, number: Number | Unknown,
        count: Callable[[], list[Number | Unknown]] | None = None,
    ) -> Tensor:
        """The part of a microbatch with this loss. Called in each F, and again in a recomputation.

        ``count`` returns numbers like those of all microbatches in their counts. Default: these are estimated.
        """
        if self._by_rows is None and not getattr(number, "nothing", False):
            self._by_rows = isinstance(number, Unknown)
        if isinstance(number, Unknown) or self._by_rows:
            number = numbers.simple(value, MEAN, float(self._rows[i]))
        self._numbers[i], self._like = number.mapped(Tensor.detach), value.detach()
        if not self._estimates and not number.nothing:
            self._live = [atom.grad and atom.kind is not CONSTANT for atom in number.atoms]
            self._estimates = self._expected(number, self._rows[i], count)
        if self._last is None and len(self._numbers) == len(self._rows):
            self._last = i
        if number.nothing and i == self._last and self._adds_graph():
            raise self._different()
        if number.nothing or not value.requires_grad:
            return value
        if i == self._last or len(number.values) != len(self._estimates):
            self._same = self._aligned([self._numbers[i] for i in sorted(self._numbers)])
        own = [
            _share(atom, x, amount, len(number.entries) > 1) if live else x if atom.kind is CONSTANT else amount
            for atom, x, live, amount in zip(number.atoms, number.values, self._live, self._estimates)
        ]
        part, names = number.evaluate(own), [entry.name for entry in number.entries if isinstance(entry, Instruction)]
        if any(self._live) and all([name in _SCALES or RULES.get(name) in (views.keep, views.view) for name in names]):
            return part  # Nothing is added to it.
        part = part - number.evaluate(self._without_live(number, self._estimates))
        if i != self._last:
            return part
        rest = number.evaluate(self._without_live(number, self._totals(self._same)))
        unit = self._correction()
        return part + rest if unit is None else part + rest / unit

    def result(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and the factor for gradients from B that started with this scale (None: 1)."""
        self._same = self._same or self._aligned([self._numbers[i] for i in sorted(self._numbers)])
        unit, like, loss = self._correction(), self._like, numbers.computed(self._same)
        dtype = torch.promote_types(like.dtype, torch.float32)
        if unit is not None:  # The host doesn't wait for it.
            unit = torch.full((), unit, dtype=dtype, device=like.device) if isinstance(unit, float) else unit.to(
                like.device, dtype)
        if scale is not None:
            unit = scale.reciprocal() if unit is None else unit / scale
        return loss.to(like.device, like.dtype).reshape(()), unit

    def _expected(self, number: Number, rows: int, count: Callable[[], list[Number | Unknown]] | None) -> list[Any]:
        """What atoms of the batch count, or are, from those of one microbatch."""
        pairs = [*zip(number.atoms, number.values, self._live)]
        if count is not None and any([
            isinstance(atom.count, Tensor) if live else atom.kind is SUM for atom, _, live in pairs
        ]):
            return self._totals(self._aligned([number, *count()])[1:])
        all_rows, amounts = sum(self._rows), []
        for atom, x, live in pairs:
            amount: Any = x.detach() if not live else atom.count if atom.kind is MEAN else None
            if amount is not None and (live or atom.kind is SUM):
                many = amount * (all_rows / max(1, rows))
                amount = torch.where(amount <= 0, all_rows, many) if isinstance(amount, Tensor) else many or all_rows
            amounts.append(amount)
        return self._with_slopes(number, amounts)

    def _with_slopes(self, number: Number, amounts: list[Any]) -> list[Any]:
        """Amounts on which the loss grows with its sums and means: one that is 0 or NaN can't be corrected."""
        factors = self._without_graph(number)
        if not any(factors) or not any(self._live):
            return amounts
        slopes = torch.stack([x.float() for x in self._slopes(number, amounts).values()])
        good = (slopes.isfinite() & (slopes != 0)).all()
        return [torch.where(good, x, x.nan_to_num() / 2 + 0.25) if factor else x for x, factor in zip(amounts, factors)]

    def _aligned(self, each: Sequence[Number | Unknown]) -> list[Number]:
        """Those that count anything."""
        known = [number for number in each if isinstance(number, Number)]
        same = numbers.aligned(known) if len(known) == len(each) else []
        if not same:
            raise self._different()
        return same

    def _adds_graph(self) -> bool:
        """Whether something with a graph is added to sums and means, which has to be in the last microbatch."""
        counted = [number for number in self._numbers.values() if not number.nothing]
        return any([atom.kind is CONSTANT and atom.grad and bool(atom.function) for x in counted for atom in x.atoms])

    def _different(self) -> ValueError:
        return ValueError(
            f"microbatches have losses of different kinds: {self._listed()}. Expected the same terms in each: {_WAYS}"
        )

    def _totals(self, each: Sequence[Number]) -> list[Any]:
        """What the batch's atoms count, or are."""
        columns = [*zip(*[zip(number.atoms, number.values) for number in each])]
        return [
            None if live and column[0][0].kind is SUM else
            sum([numbers.as_amount(atom.count, self._like) for atom, _ in column]) if live else
            numbers.whole(*zip(*column)) for live, column in zip(self._live, columns)
        ]

    def _correction(self) -> Any:
        """What gradients are to be multiplied by; None: 1."""
        same, totals = self._same, self._totals(self._same)
        known = [k for k, live in enumerate(self._live) if live and not same[0].atoms[k].unknown]
        units: list[Any] = [
            1.0 if totals[k] is None else
            _quotient(*[numbers.as_amount(each[k], self._like) for each in (self._estimates, totals)]) for k in known
        ]
        if any(self._without_graph(same[0])) and known:
            slopes, estimated = self._slopes(same[0], totals), self._slopes(same[0], self._estimates)
            units = [unit * _quotient(slopes[k], estimated[k]) for unit, k in zip(units, known)]
        # If some are tensors, the host waits for them, which only happens for several sums or means.
        if not all([unit is units[0] or math.isclose(float(unit), float(units[0]), rel_tol=1e-4) for unit in units]):
            raise ValueError(
                f"the loss has several terms whose counts aren't proportional: {self._listed()}. A schedule "
                "runs backward before all counts are known, and corrects all gradients by one factor. Expected terms "
                f"with one count: {_WAYS}"
            )
        return None if not units or isinstance(units[0], float) and math.isclose(units[0], 1) else units[0]

    def _without_graph(self, number: Number) -> list[bool]:
        """Which atoms are sums or means without a graph, such as counts."""
        return [not live and atom.kind is not CONSTANT for live, atom in zip(self._live, number.atoms)]

    def _slopes(self, number: Number, amounts: Sequence[Any]) -> dict[int, Tensor]:
        """How the loss grows with each sum and mean that has a graph."""
        with torch.inference_mode(False), torch.enable_grad():
            values = self._without_live(number, amounts)
            each = [x.detach().clone().requires_grad_(live) for x, live in zip(values, self._live)]
            places = [k for k, live in enumerate(self._live) if live]
            return dict(zip(places, torch.autograd.grad(number.evaluate(each), [each[k] for k in places])))

    def _without_live(self, number: Number, amounts: Sequence[Any]) -> list[Tensor]:
        """The values of atoms in the batch, with 0 for sums and means that have a graph."""
        return [
            torch.zeros_like(x) if live else x if atom.kind is CONSTANT else amount
            for atom, x, live, amount in zip(number.atoms, number.values, self._live, amounts)
        ]

    def _listed(self) -> str:
        """What the loss consists of, with the counts in each microbatch."""
        counts: dict[str, list[str]] = {}
        for i in sorted(self._numbers):
            for k, (atom, x) in enumerate(zip(self._numbers[i].atoms, self._numbers[i].values)):
                counted = f"{float(x.sum()):g}" if atom.kind is SUM and not atom.grad else "a sum"
                counted = f"{float(atom.count):g}" if atom.kind is MEAN else counted
                counts.setdefault(f"term {k} ({atom.function})", []).append(counted)
        return "; ".join([f"{name} has the counts {', '.join(each)}" for name, each in counts.items()])


def _share(atom: Atom, x: Tensor, whole: Amount | None, guarded: bool) -> Tensor:
    """A microbatch's part of a sum or mean, of which this is the count of the batch; ``guarded``: from 0 / 0."""
    if whole is None:
        return x
    count, whole = numbers.as_amount(atom.count, x), numbers.as_amount(whole, x)
    if not atom.divided:
        return x / whole
    return numbers.weighted(x, count, whole) if guarded else x * (count / whole)


def _quotient(above: Any, below: Any) -> Any:
    if isinstance(below, Tensor):
        return torch.where(below == 0, 1, above / torch.where(below == 0, 1, below))
    return above / below if below else 1.0
