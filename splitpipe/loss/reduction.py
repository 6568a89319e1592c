"""The numbers of microbatches become those of the batch: according to their trace, or to ``reduction=``.

With a schedule, B starts before the counts of later microbatches are known:

    part of a microbatch    its sums, each times a slope: the derivative of the batch's loss by that sum, as estimated
    correction              the true slope divided by the estimated one; in the end, it multiplies all gradients

There is one correction. So a loss of several sums must be linear in these, with proportional counts. A loss with
something else that has a graph, such as a penalty or a learned weight, is averaged over rows.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.numbers import Amount, Number, Unknown, amount, batch, mean

Reduce = Callable[[list[Tensor], list[int]], Tensor]
Count = Callable[[], list[Number | Unknown]]
#: A number of a call that wasn't traced, since earlier calls of its kind had returned none.
UNSEEN = Unknown("a block that returned no number before")
#: What else a user can do.
AS_FUNCTION = "reduction= as a function of the microbatches' values and row counts"
AS_PAIR = "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts"
_WAYS = f"in a SplitPipe, {AS_PAIR}, pass reduction='mean' or 'sum', or use schedule=None and a loss of model(x)."


def warn(said: set[str], function: str, ways: str) -> None:
    """Warns that a number that isn't recognised is taken as a mean over rows; once for each function, not ``said``."""
    if function not in said:
        said.add(function)
        warnings.warn(
            f"the loss, or another number of the output, could not be traced beyond {function}: microbatches are "
            "averaged by their rows, which may differ from the value of the whole batch (see splitpipe.check). In a "
            "SplitPipe, pass reduction='mean' if that is right (it silences this warning), reduction='sum' if it is a "
            f"sum, or {ways}. For a loss over the whole batch, leave out the schedule, and compute it from model(x).",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Reducer:
    """Combines numbers of microbatches."""

    reduction: str | Reduce | None
    numbers: Sequence[Mapping[int, Number | Unknown]]  #: What each microbatch's consist of, by their identity.
    said: set[str]

    def reduces(self, column: Sequence[Any]) -> bool:
        """True for numbers that are combined into one, rather than joined; with dimensions, if the trace knows them."""
        if not all([isinstance(x, Tensor) for x in column]):
            return False
        return not any([x.dim() for x in column]) or self.reduction is None and bool(self.numbers) and all([
            isinstance(each.get(id(x)), Number) for x, each in zip(column, self.numbers)
        ])

    def reduced(self, column: Sequence[Tensor], rows: list[int]) -> Tensor:
        """The number of the batch."""
        # A microbatch may have skipped the last stages, so that its values are on another device.
        values = [x.to(column[0].device) for x in column]
        like = values[0]
        if callable(self.reduction):
            given = self.reduction(values, rows)
            if not isinstance(given, Tensor) or given.dim():
                raise TypeError(f"reduction returned {type(given).__name__}: expected a tensor without dimensions, "
                                "computed from the list of microbatches' values and the list of their row counts.")
            return given
        if self.reduction == "sum":
            return torch.stack(values).sum()
        each = [known.get(id(x), UNSEEN) for x, known in zip(column, self.numbers)] if self.reduction is None else []
        found = batch(each)
        if found is None and not like.is_floating_point():
            raise ValueError(f"the output has a number of type {like.dtype}, which is different for every microbatch: "
                             f"expected a floating-point number, a sum, or {AS_FUNCTION}.")
        if found is None and self.reduction is None:
            unknown = [x.function for x in each if isinstance(x, Unknown)]
            warn(self.said, [*unknown, "code that differs between microbatches"][0], AS_FUNCTION)
        by_rows = [mean(x, float(count)) for x, count in zip(values, rows)] if found is None else []
        number, totals = found or batch(by_rows)  # type: ignore[misc]
        whole: Tensor = number.evaluate(totals).to(like.dtype)
        return whole if any([x.requires_grad for x in values]) else whole.detach()


class BatchLoss:
    """Makes the loss of the batch from those of microbatches with these numbers of rows.

    ``reduction``: as given by the user. ``said``: of what was warned. ``ways``: what else a warning should say.
    """

    def __init__(self, rows: Sequence[int], reduction: str | None, said: set[str], ways: str) -> None:
        self._rows = rows if len(rows) > 1 else [1]  # A batch may have no rows.
        self._reduction, self._said, self._ways = reduction, said, ways
        self._numbers: dict[int, list[Number | Unknown]] = {}  #: That of each microbatch, and as a mean over its rows.
        self._by_rows: bool | None = None  #: Whether all are taken as means over rows, as the first one was.
        self._slopes: dict[int, Tensor] = {}  #: The estimated slopes, by the place of the sum.
        self._estimates: Sequence[Amount] = ()  #: Those of the batch's sums and constants.

    def part(self, i: int, value: Tensor, number: Number | Unknown, count: Count | None = None) -> Tensor:
        """The part of a microbatch with this loss. Called in each F, and again in a recomputation.

        ``count`` returns a number for each microbatch, with its true counts. Default: they are estimated.
        """
        if isinstance(number, Unknown) and self._reduction == "sum":
            number = amount("loss_fn", value)
        by_rows = mean(value, float(self._rows[i]))
        if self._by_rows is None and not (isinstance(number, Number) and number.formula.nothing):
            wrong = number.function if isinstance(number, Unknown) else self._estimate(number, self._rows[i], count)
            self._by_rows = wrong is not None
            if wrong is not None:
                self._estimate(by_rows, self._rows[i])
                if self._reduction is None and len(self._rows) > 1:
                    warn(self._said, wrong, self._ways)
        each = by_rows if self._by_rows else number
        self._numbers[i] = [x.mapped(Tensor.detach) if isinstance(x, Number) else x for x in (each, by_rows)]
        if isinstance(each, Unknown) or each.formula.nothing or not value.requires_grad:
            return value
        values = dict(enumerate(each.amounts.values()))
        if not self._slopes.keys() <= values.keys():
            raise self._refused()
        if len(each.steps) == 1 and self._slopes:
            return value  # A factor of 1 would be saved for backward.
        return sum([values[k] * slope for k, slope in self._slopes.items()], value.detach() * 0).reshape(())

    def _estimate(self, number: Number, rows: int, count: Count | None = None) -> str | None:
        """Estimates the batch's sums, and the slopes. Returns what makes one correction too few; None: nothing."""
        whole, factor = sum(self._rows), sum(self._rows) / max(1, rows)

        def scaled(x: Any) -> Any:
            return torch.where(x == 0, whole, x * factor) if isinstance(x, Tensor) else x * factor or whole

        for one, x in number.amounts.items():
            if one.grad and not one.nothing and (one.constant or x.numel() > 1 or x.is_complex()):
                return one.name
        detached = number.mapped(Tensor.detach).amounts  # A graph that is kept would keep activations.
        estimates = [x if one.constant else scaled(x) for one, x in detached.items()]
        self._estimates = estimates if count is None else self._batch(count())[1]
        slopes, linear = _slopes(number, self._estimates)
        if len(slopes) == 1:  # From a slope of 0, nothing could be corrected.
            slopes = {k: torch.where(x.isfinite() & (x != 0), x, 1 / whole) for k, x in slopes.items()}
        self._slopes = slopes
        corrected = len(slopes) == 1 and count is None  # Across processes, there is no correction.
        return None if linear or corrected else f"{number.formula.name}, which isn't linear in its sums"

    def result(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and the correction of gradients from B that started with this scale (None: 1)."""
        number, totals = self._batch([each[bool(self._by_rows)] for _, each in sorted(self._numbers.items())])
        loss, one = number.evaluate(totals).reshape(()), torch.ones(())
        correction = self._correction(number, totals) if self._slopes else None if scale is None else one
        if correction is not None:
            correction = correction.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        return loss, correction if scale is None or correction is None else correction / scale

    def _batch(self, each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]]:
        found = batch(each)
        if found is None:
            raise self._refused()
        return found

    def _correction(self, number: Number, totals: Sequence[Amount]) -> Tensor:
        """What gradients are to be multiplied by."""
        counts: list[Any] = [(x, y) for one, x, y in zip(number.amounts, totals, self._estimates) if not one.grad]
        if len(self._slopes) > 1 and all([not isinstance(x, Tensor) and math.isclose(x, y) for x, y in counts]):
            return torch.ones_like(next(iter(self._slopes.values()))).reshape(())  # Several means of all rows.
        slopes = [(x.reshape(()), self._slopes[k].reshape(())) for k, x in _slopes(number, totals)[0].items()]
        if len(slopes) > 1:  # Then the host waits for them. Those of 0 have no part in the loss.
            slopes = [(x, y) for x, y in slopes if float(x) or float(y)] or slopes
        first, *others = [torch.where(x.isfinite() & (x != y), x / y, 1) for x, y in slopes]
        half = any([isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4 for x in totals])
        if not all([math.isclose(float(first), float(x), rel_tol=1e-2 if half else 1e-4) for x in others]):
            raise self._refused()
        return first

    def _refused(self) -> ValueError:
        counts = [[f"{one.name}: {float(torch.as_tensor(x).sum()):g}" for one, x in y.amounts.items() if not one.grad]
                  for _, (y, _) in sorted(self._numbers.items()) if isinstance(y, Number)]
        return ValueError(
            "the loss has terms of different kinds, or terms whose counts aren't proportional, in its microbatches "
            f"(counts: {counts}). A schedule runs backward before all counts are known, and corrects all gradients "
            f"by one factor. Expected the same terms, with one count: {_WAYS}"
        )


def _slopes(number: Number, amounts: Sequence[Amount]) -> tuple[dict[int, Tensor], bool]:
    """The number's derivatives by each sum that has a graph, and whether they depend on no sum."""
    detached: list[str] = []
    with torch.inference_mode(False), torch.enable_grad():
        each: list[Any] = [x.detach().clone() if isinstance(x, Tensor) else x for x in amounts]
        live = {k: each[k].requires_grad_() for k, one in enumerate(number.amounts) if one.grad and not one.constant}
        out = number.evaluate(each, detached)
        if not live or not out.requires_grad:
            return {}, True
        found = torch.autograd.grad(out, [*live.values()], create_graph=True, allow_unused=True)
    slopes = {k: x for k, x in zip(live, found) if x is not None}
    linear = not detached and not any([x.requires_grad for x in slopes.values()])
    return {k: x.detach() for k, x in slopes.items()}, linear
