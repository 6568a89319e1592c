"""The loss inside a call, with a schedule: B starts before the counts of later microbatches are known.

    part of a microbatch    its sums, each times a slope: the derivative of the batch's loss by that sum, as estimated
    correction              the true slope divided by the estimated one; in the end, it multiplies all gradients

There is one correction. So a loss of several sums must be linear in these, with proportional counts. A loss with
something else that has a graph, such as a penalty or a learned weight, is averaged over rows.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.compiled.layers import is_compiled
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.numbers import AS_PAIR, Amount, Number, Unknown, amount, batch, mean, quotient, warn
from splitpipe.loss.trace import Trace
from splitpipe.microbatch.tree import hidden
from splitpipe.skip.tracker import Key, Namespace, opened

Count = Callable[[], list[Number | Unknown]]
#: A microbatch's target and number are passed as skips, from the caller to the last stage.
TARGET: Key = (Namespace(), "target")
MICROBATCH: Key = (Namespace(), "microbatch")
_REFUSED = (
    "the loss has terms of different kinds, or terms whose counts aren't proportional, in its microbatches: a schedule "
    "runs backward before all counts are known, and corrects all gradients by one factor. Expected the same terms, and "
    f"one count: {AS_PAIR}, pass reduction='mean' or 'sum', or compute the loss from model(x), without a schedule."
)


class Objective(nn.Module):
    """The loss of a microbatch, as a layer; ``reduction`` and ``said`` as in ``BatchLoss``."""

    def __init__(self, loss_fn: Callable[..., Any], reduction: str | None, said: set[str]) -> None:
        super().__init__()
        # If loss_fn is a module, it becomes one of the stage's modules; any other callable is an attribute.
        self.loss_fn, self.reduction, self._said = loss_fn, reduction, said
        self.compiled = is_compiled(loss_fn)
        self.begin([1, 1])

    def begin(self, rows: Sequence[int], input: Sequence[int | None] = (), target: Sequence[int | None] = ()) -> None:
        """Begins a call whose microbatches have these rows, along these dimensions of input and target."""
        self.batch_loss = BatchLoss(rows, self.reduction, self._said)
        self._rows, self._input, self._target = rows, input, [dim for dim in target if dim is not None]

    def forward(self, output: Any) -> Any:
        """The part of a microbatch in the batch's loss."""
        box: Any = opened.get()
        i = box.pop(MICROBATCH)
        value, number = self.loss(i, output, box.pop(TARGET))
        with DisableTorchFunction():
            return self.batch_loss.part(i, value, number)

    def loss(self, i: int, output: Any, target: Any, trace: Trace | None = None) -> tuple[Tensor, Number | Unknown]:
        """The loss of a microbatch, and what it consists of; ``trace`` has seen how the output was computed."""
        with DisableTorchFunction():
            traces = self.reduction is None and len(self._rows) > 1 and not self.compiled
            trace = self._begun(trace, i, output, target) if traces else None
        with trace or nullcontext():
            value = self.loss_fn(output, target)
        with DisableTorchFunction():  # The user's function modes don't see these checks.
            loss, count = _verified(value)
            if count is not None:
                return loss, quotient(loss, count, loss)
            number = Unknown("a compiled function") if trace is None else trace.ledger.number(value)
            return loss, number or Unknown("loss_fn")

    def _begun(self, trace: Trace | None, i: int, output: Any, target: Any) -> Trace:
        """A trace that knows where the rows are in the output and in the target."""
        if trace is None:
            trace = Trace(self._rows, i, self._input)
            trace.ledger.note_numbers(output, "a layer")
        trace.ledger.begin(output, trace.ledger.dim, Unknown("a layer"))
        trace.ledger.begin(target, [*self._target, 0][0])
        # A list of values without a batch may have one entry per row.
        if not self._target or not any([x.dim() and x.shape[0] == trace.ledger.rows for x in hidden((target,))]):
            trace.ledger.begin_entries(target)
        return trace


def _verified(value: Any) -> tuple[Tensor, Amount | None]:
    """A loss, or the total and the count of a pair."""
    loss, count = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
    plain = count is None or isinstance(count, (int, float)) or isinstance(count, Tensor) and count.numel() == 1
    if not plain or isinstance(count, Tensor) and count.requires_grad or not (
        isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    ):
        raise TypeError(
            f"loss_fn returned {_shown(loss)}{'' if count is None else f' and the count {_shown(count)}'}: expected a "
            "tensor of one number, or a pair (total, count), for the sum of totals divided by the sum of counts, which "
            "have no graph. Reduce it (loss.mean()), or start from output.sum() * 0 in place of 0."
        )
    return loss.reshape(()), count.reshape(()) if isinstance(count, Tensor) else count


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    graph = ", with a graph" if value.requires_grad else ""
    return f"a tensor of shape {list(value.shape)} and type {value.dtype}{graph}"


class BatchLoss:
    """Makes the loss of the batch; ``reduction``: as the user gave it; ``said``: of which functions was warned."""

    def __init__(self, rows: Sequence[int], reduction: str | None, said: set[str]) -> None:
        self._rows = rows if len(rows) > 1 else [1]  # A batch may have no rows.
        self._reduction, self._said = reduction, said
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
                    warn(self._said, wrong)
        each = by_rows if self._by_rows else number
        self._numbers[i] = [x.mapped(Tensor.detach) if isinstance(x, Number) else x for x in (each, by_rows)]
        if isinstance(each, Unknown) or each.formula.nothing or not value.requires_grad:
            return value
        values = dict(enumerate(each.amounts.values()))
        if not self._slopes.keys() <= values.keys():
            raise ValueError(_REFUSED)
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
        loss = number.evaluate(totals).reshape(())
        if scale is None and not self._slopes:
            return loss, None
        correction = self._correction(number, totals) if self._slopes else torch.ones(())
        correction = correction.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        return loss, correction if scale is None else correction / scale

    def _batch(self, each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]]:
        found = batch(each)
        if found is None:
            raise ValueError(_REFUSED)
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
            raise ValueError(_REFUSED)
        return first


def _slopes(number: Number, amounts: Sequence[Amount]) -> tuple[dict[int, Tensor], bool]:
    """The number's derivatives by each sum that has a graph, and whether they depend on no sum."""
    with torch.inference_mode(False), torch.enable_grad():
        each: list[Any] = [x.detach().clone() if isinstance(x, Tensor) else x for x in amounts]
        live = {k: each[k].requires_grad_() for k, one in enumerate(number.amounts) if one.grad and not one.constant}
        out = number.evaluate(each)
        if not live or not out.requires_grad:
            return {}, True
        found = torch.autograd.grad(out, [*live.values()], create_graph=True, allow_unused=True)
    slopes = {k: x for k, x in zip(live, found) if x is not None}
    linear = not any([x.requires_grad for x in slopes.values()]) and not any([step.detached for step in number.steps])
    return {k: x.detach() for k, x in slopes.items()}, linear
