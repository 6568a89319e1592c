"""Numbers of microbatches, put together: which are computed in the same way, and what counts nothing."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from splitpipe.loss.numbers import MEAN, SUM, Amount, Atom, Instruction, Number, Ref, combined


def number(value: float, kind: str = MEAN, count: Amount = 1.0, factor: float | None = None) -> Number:
    """A sum or mean, times a factor if one is given."""
    times = Instruction("mul", Tensor.mul, (Ref(0), factor), {}, False, False, 0)
    entries = (Atom(kind, "mean", count), *[times] * (factor is not None))
    return Number(entries, (torch.tensor(value),))


def test_means_are_weighted_by_their_counts() -> None:
    counts = [torch.tensor(count) for count in (2, 3, 0)]
    each = [number(value, count=count) for value, count in zip((1.0, 4.0, float("nan")), counts)]
    assert combined(each) == pytest.approx(14 / 5)


def test_numbers_that_were_computed_in_different_ways_are_not_combined() -> None:
    one = number(1.0, factor=2.0)
    assert combined([one, one]) == 2
    for other in (number(1.0), number(1.0, factor=3.0), number(1.0, SUM, factor=2.0)):
        assert combined([one, other]) is None


def test_a_microbatch_counts_nothing_if_masks_decide_what_counts_in_the_others() -> None:
    nothing = replace(number(0.0), nothing=True)
    counted = [number(value, count=torch.tensor(count)) for value, count in ((1.0, 2), (4.0, 3))]
    assert combined([*counted, replace(nothing, empty=True)]) == pytest.approx(14 / 5)
    assert combined([*counted, nothing]) is None  # Nobody has asked whether anything counts.
    assert combined([number(1.0), replace(nothing, empty=True)]) is None
    assert combined([nothing, nothing]) == 0


def test_sums_of_whole_numbers_are_whole_numbers() -> None:
    each = [Number((Atom(SUM),), (torch.tensor(2**40 + k),)) for k in range(3)]
    found = combined(each)
    assert found is not None and found.dtype == torch.int64 and int(found) == 3 * 2**40 + 3
    small = combined([Number((Atom(SUM),), (torch.tensor(2, dtype=torch.int32),))] * 3)
    assert small is not None and small.dtype == torch.int32
