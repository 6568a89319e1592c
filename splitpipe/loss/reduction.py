"""The numbers of microbatches become those of the batch: according to their trace, or to ``reduction=``."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.numbers import Number, Unknown, batch, mean

Reduce = Callable[[list[Tensor], list[int]], Tensor]
#: A number of a call that wasn't traced, since earlier calls of its kind had returned none.
UNSEEN = Unknown("a block that returned no number before")
#: What else a user can do.
AS_FUNCTION = "reduction= as a function of the microbatches' values and row counts"
AS_PAIR = "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts"
NO_FUNCTION = (
    "reduction= is a function, but a schedule runs backward before all losses are known: expected None, "
    "'mean' or 'sum', or a loss_fn that returns a pair (total, count)."
)


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


class Reducer:
    """Combines numbers of microbatches. ``numbers``: what each microbatch's consist of, by their identity."""

    def __init__(
        self, reduction: str | Reduce | None, numbers: Sequence[Mapping[int, Number | Unknown]], said: set[str]
    ) -> None:
        self._reduction, self._numbers, self._said = reduction, numbers, said

    def reduces(self, column: Sequence[Any]) -> bool:
        """True for numbers that are combined into one, rather than joined; with dimensions, if the trace knows them."""
        if not all([isinstance(x, Tensor) for x in column]):
            return False
        return not any([x.dim() for x in column]) or self._reduction is None and bool(self._numbers) and all([
            isinstance(each.get(id(x)), Number) for x, each in zip(column, self._numbers)
        ])

    def reduced(self, column: Sequence[Tensor], rows: list[int]) -> Tensor:
        """The number of the batch."""
        # A microbatch may have skipped the last stages, so that its values are on another device.
        values = [x.to(column[0].device) for x in column]
        like = values[0]
        if callable(self._reduction):
            given = self._reduction(values, rows)
            if not isinstance(given, Tensor) or given.dim():
                raise TypeError(
                    f"reduction returned {type(given).__name__}: expected a tensor without dimensions, computed from "
                    "the list of microbatches' values and the list of their row counts."
                )
            return given
        if self._reduction == "sum":
            return torch.stack(values).sum()
        found = None
        if self._reduction is None:
            each = [known.get(id(x), UNSEEN) for x, known in zip(column, self._numbers)]
            found = batch(each)
            if found is None and like.is_floating_point():
                unknown = [x.function for x in each if isinstance(x, Unknown)]
                warn(self._said, [*unknown, "code that differs between microbatches"][0], AS_FUNCTION)
        if found is None and not like.is_floating_point():
            raise ValueError(
                f"the output has a number of type {like.dtype}, which is different for every microbatch: expected a "
                f"floating-point number, a sum, or {AS_FUNCTION}."
            )
        if found is None:
            found = batch([mean(x, float(count)) for x, count in zip(values, rows)])
        number, totals = found  # type: ignore[misc]
        whole: Tensor = number.evaluate(totals).to(like.dtype)
        return whole if any([x.requires_grad for x in values]) else whole.detach()


def verify_reduction(reduction: object) -> None:
    """Raises unless ``reduction`` is valid."""
    if reduction is not None and not callable(reduction) and reduction not in ("mean", "sum"):
        wrong = ValueError if isinstance(reduction, str) else TypeError
        raise wrong(
            f"reduction is {reduction!r}: expected None (from the trace), 'mean' (weighted by rows), 'sum', or a "
            "function of the list of microbatches' values and the list of their row counts."
        )
