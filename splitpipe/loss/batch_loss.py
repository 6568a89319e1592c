"""The batch's loss with a schedule, where B starts before the counts of later microbatches are known.

    part of a microbatch    its sums, each times a slope: the derivative of the batch's loss by that sum, as estimated
    correction              the true slope by the estimated one; in the end, it multiplies all gradients

There is one correction, so several sums must need the same one: they must have proportional counts. What else has a
graph, such as a penalty or a learned weight, is in the part of the last microbatch, when all is known.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import numbers, views
from splitpipe.loss.numbers import ADDING, DIVIDING, SCALING, Amount, Number, Quantity, Unknown
from splitpipe.loss.reduction import AS_PAIR
from splitpipe.loss.rules import RULES, reduce

_WAYS = f"in a SplitPipe, {AS_PAIR}, pass reduction='mean' or 'sum', or use schedule=None and a loss of model(x)."
#: Rules that are linear in all numbers together, and names of functions that are linear in each one alone.
_LINEAR = frozenset([views.keep, views.view, views.index, views.join, reduce])
_SCALES = SCALING | {"neg", "negative", "dot"}


def scheduled(number: Number | Unknown, corrects: bool = True) -> Number | Unknown:
    """The number, if B can start before it is known: if it is any function of one sum, or linear in several.

    ``corrects``: whether gradients are corrected in the end. If not, it must be linear in one sum, too. If B can't
    start, Unknown with the function because of which it can't.
    """
    if isinstance(number, Unknown):
        return number
    of = dict[Quantity, frozenset[Quantity]]()  #: The sums of which each quantity has the graph.
    wrong: list[str] = []  #: The functions that aren't linear, then the sums that aren't one real number.
    for q in number.quantities:
        each = [of[x] for x in q.operands if of[x]]
        own = frozenset().union(*each) if q.function is not None or q.constant else frozenset([q])
        of[q] = own if q.grad else frozenset()
        if each and not (q.grad and _is_linear(q, len(each), of)):
            wrong.append(q.name)
    if len(of[number.quantities[-1]]) < 2 and corrects and not _adds_graph(number):
        wrong = []  # One correction is exact for any function of one sum.
    sums: list[Any] = [(atom, x) for atom, x in zip(number.atoms, number.values) if of[atom]]
    wrong += [atom.name for atom, x in sums if x.numel() > 1 or x.is_complex()]
    return Unknown(wrong[0]) if wrong else number


def _is_linear(q: Quantity, many: int, of: dict[Quantity, frozenset[Quantity]]) -> bool:
    """Whether a call is linear in its operands with the graph of sums, of which there are ``many``."""
    if q.name in ADDING or RULES.get(q.name) in _LINEAR:
        return True
    # Not rdiv, which divides the other argument by the first.
    above = bool(q.args) and isinstance(q.args[0], Quantity) and bool(of[q.args[0]]) and q.name[0] != "r"
    return many == 1 and not q.kwargs and (q.name in _SCALES or q.name in DIVIDING and above)


class BatchLoss:
    """Makes the loss of the batch from those of microbatches with these numbers of rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows if len(rows) > 1 else [1]  # A batch may have no rows.
        self._numbers: dict[int, Number] = {}
        self._by_rows: bool | None = None  #: Whether all are means over rows, since the first one isn't recognised.
        self._slopes: dict[int, Tensor] | None = None  #: The estimated slopes, by the place of the sum.
        self._estimates: list[Amount] = []  #: Those of the batch's atoms.
        self._last: int | None = None  #: The microbatch with which all are known.
        self._like: Any = None  #: A microbatch's loss: the batch's has its type and device.

    def part(
        self, i: int, value: Tensor, number: Number | Unknown, count: Callable[[], list[Number | Unknown]] | None = None
    ) -> Tensor:
        """The part of a microbatch with this loss. Called in each F, and again in a recomputation.

        ``count`` returns a number for each microbatch, with its true counts. Default: they are estimated.
        """
        if self._by_rows is None and not getattr(number, "nothing", False):
            self._by_rows = isinstance(number, Unknown)
        if isinstance(number, Unknown) or self._by_rows:
            number = numbers.mean(value, float(self._rows[i]))
        self._numbers[i], self._like = number.mapped(Tensor.detach), value.detach()
        if self._last is None and len(self._numbers) == len(self._rows):
            self._last = i
        if number.nothing or not value.requires_grad:
            if i == self._last and number.nothing and any(map(_adds_graph, self._numbers.values())):
                raise self._different()
            return value
        if self._slopes is None:
            self._start(number, self._rows[i], None if self._by_rows else count)
        if len(number.values) != len(self._estimates) or self._slopes is None:
            raise self._different()
        part: Any = sum([number.values[k] * slope for k, slope in self._slopes.items()])
        if len(number.quantities) == 1 and self._slopes:
            part = number.values[0]  # A factor of 1 would be saved for backward.
        if i == self._last and _adds_graph(number):
            totals = self._batch([*self._numbers.values()])[1]
            rest = number.evaluate([
                x if atom.constant else total for atom, x, total in zip(number.atoms, number.values, totals)
            ])
            correction = self._correction(number, totals)  # Which multiplies this part's gradients, too.
            part = part + (rest if correction is None else rest / correction)
        return part.reshape(()) if isinstance(part, Tensor) else value * 0

    def result(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and the correction of gradients from B that started with this scale (None: 1)."""
        number, totals = self._batch([self._numbers[i] for i in sorted(self._numbers)])
        like, correction = self._like, self._correction(number, totals)
        if correction is not None:
            correction = correction.to(like.device, torch.promote_types(like.dtype, torch.float32))
        if scale is not None:
            correction = scale.reciprocal() if correction is None else correction / scale
        return number.evaluate(totals).to(like.device, like.dtype).reshape(()), correction

    def _start(self, number: Number, rows: int, count: Callable[[], list[Number | Unknown]] | None) -> None:
        """Estimates the batch from one of its microbatches, or from what is counted."""
        if count is None:
            whole = sum(self._rows)
            self._estimates = [
                x if atom.constant else _scaled(x, whole / max(1, rows), whole)
                for atom, x in zip(number.atoms, number.mapped(Tensor.detach).values)
            ]
        else:
            self._estimates = self._batch(count())[1]
        self._slopes = _slopes(number, self._estimates)
        if len(self._slopes) == 1:  # If the estimates make it 0, others are taken: 0 could not be corrected.
            [(k, x)] = self._slopes.items()
            others = [
                y / (n + 2) + 0.25 if isinstance(y, Tensor) and not atom.constant else y
                for n, (atom, y) in enumerate(zip(number.atoms, self._estimates))
            ]
            other = _slopes(number, others)[k] if _linear(number) else 1 / sum(self._rows)
            self._slopes[k] = torch.where(x.isfinite() & (x != 0), x, other)

    def _batch(self, each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]]:
        """A number of those that count anything, and the values of the batch's atoms."""
        same = numbers.aligned(each)
        if not same:
            raise self._different()
        return same[0], numbers.sums(same)

    def _correction(self, number: Number, totals: Sequence[Amount]) -> Tensor | None:
        """What gradients are to be multiplied by; None: 1."""
        counts = [(x, y) for atom, x, y in zip(number.atoms, totals, self._estimates) if not atom.grad]
        if not self._slopes or all([not isinstance(x, Tensor) and math.isclose(x, y) for x, y in counts]) and (
            _linear(number)  # All are means of all rows, or sums.
        ):
            return None
        slopes = [(x.reshape(()), self._slopes[k].reshape(())) for k, x in _slopes(number, totals).items()]
        if len(slopes) > 1:  # Then the host waits for them. Those of 0 have no part in the loss.
            slopes = [(x, y) for x, y in slopes if float(x) or float(y)] or slopes
        first, *others = [torch.where(x.isfinite() & (x != y), x / y, 1) for x, y in slopes]
        half = any([isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4 for x in totals])
        if not all([math.isclose(float(first), float(x), rel_tol=1e-2 if half else 1e-4) for x in others]):
            raise ValueError(
                f"the loss has several terms whose counts aren't proportional: {self._listed()}. A schedule "
                "runs backward before all counts are known, and corrects all gradients by one factor. Expected terms "
                f"with one count: {_WAYS}"
            )
        return first

    def _different(self) -> ValueError:
        return ValueError(
            f"microbatches have losses of different kinds: {self._listed()}. Expected the same terms and "
            f"factors in each: {_WAYS}"
        )

    def _listed(self) -> str:
        """What the loss consists of, with the counts in each microbatch."""
        counts: dict[str, list[str]] = {}
        for number in [self._numbers[i] for i in sorted(self._numbers)]:
            for k, (atom, x) in enumerate(zip(number.atoms, number.values)):
                counted = "a sum" if atom.grad else f"{float(x.sum() if isinstance(x, Tensor) else x):g}"
                counts.setdefault(f"term {k} ({atom.name})", []).append(counted)
        return "; ".join([f"{name} has the counts {', '.join(each)}" for name, each in counts.items()])


def _linear(number: Number) -> bool:
    """Whether it is linear in all sums that have a graph, so that slopes depend on counts alone."""
    return isinstance(scheduled(number, corrects=False), Number)


def _adds_graph(number: Number) -> bool:
    """Whether a constant has a graph, which has to be in the last microbatch's part."""
    return any([atom.constant and atom.grad and bool(atom.name) for atom in number.atoms])


def _scaled(x: Amount, factor: float, otherwise: float) -> Amount:
    """An amount of the batch, from that of a microbatch; not 0, from which nothing could be corrected."""
    if isinstance(x, Tensor):
        return x * factor if x.is_complex() else torch.where(x <= 0, otherwise, x * factor)
    return x * factor or otherwise


def _slopes(number: Number, amounts: Sequence[Amount]) -> dict[int, Tensor]:
    """The number's derivatives by each sum that has a graph."""
    with torch.inference_mode(False), torch.enable_grad():
        each: list[Any] = [
            x.detach().clone().requires_grad_(atom.grad and not atom.constant) if isinstance(x, Tensor) else x
            for atom, x in zip(number.atoms, amounts)
        ]
        live = [k for k, x in enumerate(each) if isinstance(x, Tensor) and x.requires_grad]
        out = number.evaluate(each)
        if not live or not out.requires_grad:
            return {}
        slopes = torch.autograd.grad(out, [each[k] for k in live], allow_unused=True)
        return {k: x for k, x in zip(live, slopes) if x is not None}
