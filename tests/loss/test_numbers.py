"""Numbers of microbatches, put together, where nothing counts, and of whole numbers."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from splitpipe.loss.numbers import Amount, Number, Unknown, amount, batch, quotient


def number(above: float, count: Amount = 1.0, grad: bool = False) -> Number:
    """A mean; ``grad``: of entries that nothing has selected."""
    total = amount("mean", torch.tensor(above, requires_grad=grad), selected=not grad)
    return quotient(total, amount("mean", count, selected=not grad), torch.tensor(above))


def combined(each: list[Number | Unknown]) -> Tensor | None:
    found = batch(each)
    return None if found is None else found[0].evaluate(found[1])


def nothing(empty: bool) -> Number:
    return replace(amount("", torch.tensor(0.0), constant=True, nothing=True), empty=empty)


def test_a_microbatch_counts_nothing_if_masks_decide_what_counts_in_the_others() -> None:
    counted = [number(above, torch.tensor(count)) for above, count in ((2.0, 2), (12.0, 3))]
    assert combined([*counted, nothing(True)]) == pytest.approx(14 / 5)
    assert combined([*counted, nothing(False)]) is None  # Nobody has asked whether anything counts.
    assert combined([number(1.0, grad=True), nothing(True)]) is None
    assert combined([nothing(False)] * 2) == 0


def test_sums_of_whole_numbers_are_whole_numbers() -> None:
    found = combined([amount("sum", torch.tensor(2**40 + k)) for k in range(3)])
    assert found is not None and found.dtype == torch.int64 and int(found) == 3 * 2**40 + 3
    small = combined([amount("sum", torch.tensor(2, dtype=torch.int32))] * 3)
    assert small is not None and small.dtype == torch.int32
