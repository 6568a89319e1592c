"""The batch's loss with a schedule, where B starts before the counts of later microbatches are known.

    part of a microbatch    its sums, each times a slope: the derivative of the batch's loss by that sum, as estimated
    correction              the true slope divided by the estimated one; in the end, it multiplies all gradients

The loss is linear in its sums (numbers), so slopes depend on counts alone. There is one correction, so several sums
must have proportional counts. A loss with something else that has a graph, such as a penalty or a learned weight, is
averaged over rows.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import numbers
from splitpipe.loss.numbers import Amount, Formula, Number, Unknown
from splitpipe.loss.reduction import AS_PAIR, warn

_WAYS = f"in a SplitPipe, {AS_PAIR}, pass reduction='mean' or 'sum', or use schedule=None and a loss of model(x)."
Count = Callable[[], list[Number | Unknown]]


class BatchLoss:
    """Makes the loss of the batch from those of microbatches with these numbers of rows.

    ``reduction``: as given by the user. ``said``: of what was warned. ``ways``: what else a warning should say.
    """

    def __init__(self, rows: Sequence[int], reduction: str | None, said: set[str], ways: str) -> None:
        self._rows = rows if len(rows) > 1 else [1]  # A batch may have no rows.
        self._reduction, self._said, self._ways = reduction, said, ways
        self._numbers: dict[int, Number] = {}
        self._by_rows: bool | None = None  #: Whether all are taken as means over rows, as the first one was.
        self._slopes: dict[int, Tensor] | None = None  #: The estimated slopes, by the place of the sum.
        self._estimates: list[Amount] = []  #: Those of the batch's sums and constants.

    def part(self, i: int, value: Tensor, number: Number | Unknown, count: Count | None = None) -> Tensor:
        """The part of a microbatch with this loss. Called in each F, and again in a recomputation.

        ``count`` returns a number for each microbatch, with its true counts. Default: they are estimated.
        """
        if isinstance(number, Unknown) and self._reduction == "sum":
            number = numbers.amount("loss_fn", value)
        wrong = number.function if isinstance(number, Unknown) else _unfit(number)
        if wrong is not None and self._reduction is None and len(self._rows) > 1:
            warn(self._said, wrong, self._ways)
        if self._by_rows is None and not (isinstance(number, Number) and number.formula.nothing):
            self._by_rows = wrong is not None
            for j, x in self._numbers.items() if self._by_rows else ():  # In which nothing counts.
                self._numbers[j] = numbers.mean(x.evaluate([*x.amounts.values()]), float(self._rows[j]))
        if isinstance(number, Unknown) or wrong is not None or self._by_rows:
            number = numbers.mean(value, float(self._rows[i]))
        self._numbers[i] = number.mapped(Tensor.detach)
        if number.formula.nothing or not value.requires_grad:
            return value
        if self._slopes is None:
            self._estimates = self._estimated(self._numbers[i], self._rows[i], None if self._by_rows else count)
            self._slopes = _slopes(number, self._estimates)
            counts = [x for one, x in zip(number.amounts, self._estimates) if not one.grad and isinstance(x, Tensor)]
            if counts and len(self._slopes) == 1:
                other = 1 / sum(self._rows)  # From a slope of 0, nothing could be corrected.
                self._slopes = {k: torch.where(x.isfinite() & (x != 0), x, other) for k, x in self._slopes.items()}
        if len(number.amounts) != len(self._estimates):
            raise self._refused("terms of different kinds, or other factors, in its microbatches")
        if len(number.steps) == 1 and self._slopes:
            return value  # A factor of 1 would be saved for backward.
        values = [*number.amounts.values()]
        part: Any = sum([values[k] * slope for k, slope in self._slopes.items()])
        return part.reshape(()) if isinstance(part, Tensor) else value * 0

    def result(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and the correction of gradients from B that started with this scale (None: 1)."""
        number, totals = self._batch([self._numbers[i] for i in sorted(self._numbers)])
        loss, correction = number.evaluate(totals).reshape(()), self._correction(number, totals)
        if correction is not None:
            correction = correction.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        if scale is not None:
            correction = scale.reciprocal() if correction is None else correction / scale
        return loss, correction

    def _estimated(self, number: Number, rows: int, count: Count | None) -> list[Amount]:
        """The batch's sums and constants, from those of one of its microbatches, or from what is counted."""
        if count is not None:
            return self._batch(count())[1]
        whole, factor = sum(self._rows), sum(self._rows) / max(1, rows)

        def scaled(x: Any) -> Any:
            return torch.where(x == 0, whole, x * factor) if isinstance(x, Tensor) else x * factor or whole

        return [x if one.constant else scaled(x) for one, x in number.amounts.items()]

    def _batch(self, each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]]:
        found = numbers.batch(each)
        if found is None:
            raise self._refused("terms of different kinds, or other factors, in its microbatches")
        return found

    def _correction(self, number: Number, totals: Sequence[Amount]) -> Tensor | None:
        """What gradients are to be multiplied by; None: 1."""
        counts: list[Any] = [(x, y) for one, x, y in zip(number.amounts, totals, self._estimates) if not one.grad]
        if not self._slopes or all([not isinstance(x, Tensor) and math.isclose(x, y) for x, y in counts]):
            return None  # All are sums, or means of all rows.
        slopes = [(x.reshape(()), self._slopes[k].reshape(())) for k, x in _slopes(number, totals).items()]
        if len(slopes) > 1:  # Then the host waits for them. Those of 0 have no part in the loss.
            slopes = [(x, y) for x, y in slopes if float(x) or float(y)] or slopes
        first, *others = [torch.where(x.isfinite() & (x != y), x / y, 1) for x, y in slopes]
        half = any([isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4 for x in totals])
        if not all([math.isclose(float(first), float(x), rel_tol=1e-2 if half else 1e-4) for x in others]):
            raise self._refused("terms whose counts aren't proportional")
        return first

    def _refused(self, found: str) -> ValueError:
        counts = [[f"{one.name}: {float(torch.as_tensor(x).sum()):g}" for one, x in y.amounts.items() if not one.grad]
                  for _, y in sorted(self._numbers.items())]
        return ValueError(
            f"the loss has {found} (counts by microbatch: {counts}). A schedule runs backward before all counts are "
            f"known, and corrects all gradients by one factor. Expected the same terms, with one count: {_WAYS}"
        )


def _unfit(number: Number) -> str | None:
    """A constant with a graph; or the function that isn't linear in sums, or has made one that isn't a real number."""
    steps: list[tuple[Formula, Any]] = [(x, y) for x, y in number.steps.items() if x.grad and not x.nothing]
    return next((x.name for x, y in steps if x.constant or not x.linear
                 or y is not None and (y.numel() > 1 or y.is_complex())), None)


def _slopes(number: Number, amounts: Sequence[Amount]) -> dict[int, Tensor]:
    """The number's derivatives by each sum that has a graph."""
    with torch.inference_mode(False), torch.enable_grad():
        each: list[Any] = [
            x.detach().clone().requires_grad_(one.grad and not one.constant) if isinstance(x, Tensor) else x
            for one, x in zip(number.amounts, amounts)
        ]
        live = [k for k, x in enumerate(each) if isinstance(x, Tensor) and x.requires_grad]
        out = number.evaluate(each)
        if not live or not out.requires_grad:
            return {}
        slopes = torch.autograd.grad(out, [each[k] for k in live], allow_unused=True)
        return {k: x for k, x in zip(live, slopes) if x is not None}
