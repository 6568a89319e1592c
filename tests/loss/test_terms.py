"""What numbers of microbatches are made of, put together: by kind and by count."""
from __future__ import annotations

import pytest
import torch

from splitpipe.loss import terms
from splitpipe.loss.terms import CONSTANT, MEAN, SUM, Amount, Count, Number, Term


def mean(value: float, count: Amount, function: str = "mean") -> Term:
    return Term(torch.tensor(value), MEAN, Count(count), 1.0, function)


def test_numbers_that_differ_in_kind_are_not_aligned() -> None:
    one = Number((mean(1.0, 2.0),))
    assert terms.aligned([one, Number((mean(1.0, 2.0), mean(1.0, 2.0)))]) is None
    assert terms.aligned([one, Number((Term(torch.tensor(3.0), SUM),))]) is None
    assert terms.aligned([one, Number((mean(1.0, 2.0, "other"),))]) is None
    assert terms.aligned([one, Number((one.terms[0], Term(torch.tensor(3.0), SUM, factor=0.0)))]) is not None


def test_a_microbatch_without_terms_counts_nothing_if_counts_are_values_of_the_batch() -> None:
    counted, none = [Number((mean(value, torch.tensor(count)),)) for value, count in ((1.0, 2), (4.0, 3))], Number()
    columns = terms.aligned([counted[0], none, counted[1]])
    assert columns is not None
    assert float(terms.combined(columns, torch.tensor(0.0))) == pytest.approx((2 * 1.0 + 3 * 4.0) / 5)
    assert terms.aligned([Number((mean(1.0, 2.0),)), none]) is None


def test_a_constant_counts_like_the_first_mean() -> None:
    penalty = Term(torch.tensor(10.0), CONSTANT, factor=0.5)
    each = [Number((penalty, mean(value, count))).counted(1) for value, count in ((1.0, 2.0), (4.0, 3.0))]
    columns = terms.aligned(each)
    assert columns is not None
    assert float(terms.combined(columns, torch.tensor(0.0))) == pytest.approx(5 + (2 * 1.0 + 3 * 4.0) / 5)


def test_the_sum_of_no_terms_is_zero() -> None:
    assert terms.combined([], torch.tensor(5.0)) == 0
