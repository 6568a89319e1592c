"""What numbers of microbatches are made of, put together: by kind, by count, by condition."""
from __future__ import annotations

import pytest
import torch

from splitpipe.loss import terms
from splitpipe.loss.terms import MEAN, SUM, Count, Number, Term


def mean(value: float, count: float, asked: int = 0, function: str = "mean") -> Term:
    return Term(torch.tensor(value), MEAN, Count(count), 1.0, function, asked=asked)


def test_numbers_that_differ_in_kind_are_not_aligned() -> None:
    one = Number((mean(1.0, 2.0),))
    assert terms.aligned([one, Number((mean(1.0, 2.0), mean(1.0, 2.0)))]) is None
    assert terms.aligned([one, Number((Term(torch.tensor(3.0), SUM),))]) is None
    assert terms.aligned([one, Number((mean(1.0, 2.0, function="other"),))]) is None
    assert terms.aligned([one, Number((one.terms[0], Term(torch.tensor(3.0), SUM, factor=0.0)))]) is not None


def test_a_condition_that_some_microbatches_do_not_meet() -> None:
    first = Number((mean(1.0, 2.0, 1), mean(4.0, 1.0, 2)), asked=(True, True))
    second = Number((mean(3.0, 3.0, 2),), asked=(False, True))
    columns = terms.aligned([first, second])
    assert columns is not None and terms.partial([first, second])
    assert float(terms.combined(columns, [1, 1], torch.tensor(0.0))) == pytest.approx(1.0 + (4 + 9) / 4)
    assert terms.aligned([first, Number(second.terms, asked=(True, True))]) is None
    partly = Number((mean(1.0, 2.0, 1), mean(1.0, 2.0, 1)), asked=(True, True))
    assert terms.aligned([partly, Number((mean(1.0, 2.0, 1),), asked=(True, True))]) is None


def test_a_term_from_before_any_condition_that_some_microbatches_lack_was_replaced_after_one() -> None:
    before, after = Number((mean(1.0, 2.0),), asked=(False,)), Number((mean(3.0, 3.0, 1),), asked=(True,))
    assert terms.aligned([before, after]) is None


def test_all_are_not_decided_by_those_that_say_yes() -> None:
    yes, no = Number((mean(1.0, 2.0, 1),), asked=(False,)), Number((), asked=(True,))
    assert terms.aligned([yes, no]) is None


def test_the_sum_of_no_terms_is_zero() -> None:
    assert terms.combined([], [1, 1], torch.tensor(5.0)) == 0
