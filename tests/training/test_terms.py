"""What numbers of microbatches are made of, put together: by kind, by count, by condition."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitpipe.batch.reading import written
from splitpipe.loss import terms
from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Row
from splitpipe.loss.terms import MEAN, SUM, Divisor, Number, Term, Unknown


def mean(value: float, count: float, asked: int = 0, function: str = "mean") -> Term:
    return Term(torch.tensor(value), MEAN, Divisor(count), 1.0, function, asked=asked)


@pytest.mark.parametrize(("divisor", "expected"), [
    (Divisor(2.0, least=5.0), 5.0), (Divisor(2.0, least=torch.tensor(5.0)), 5.0), (Divisor(2.0, 4.0), 6.0),
    (Divisor(torch.tensor(7.0), least=5.0), 7.0), (Divisor(torch.tensor(7.0), 1.0, torch.tensor(9.0)), 9.0),
])
def test_a_divisor_is_its_count_and_more_or_at_least_so_much(divisor: Divisor, expected: float) -> None:
    assert float(divisor.here) == expected


def test_numbers_that_differ_in_kind_are_not_aligned() -> None:
    one = Number((mean(1.0, 2.0),))
    assert terms.aligned([one, Number(one.terms, least=1.0)]) is None
    assert terms.aligned([one, Number((mean(1.0, 2.0), mean(1.0, 2.0)))]) is None
    assert terms.aligned([one, Number((Term(torch.tensor(3.0), SUM),))]) is None
    assert terms.aligned([one, Number((mean(1.0, 2.0, function="other"),))]) is None


def test_a_condition_that_some_microbatches_do_not_meet() -> None:
    first, second = Number((mean(1.0, 2.0, 1), mean(4.0, 1.0, 2)), asked=2), Number((mean(3.0, 3.0, 2),), asked=2)
    columns = terms.aligned([first, second])
    assert columns is not None and terms.conditional([first, second])
    assert float(terms.combined(columns, [1, 1], torch.tensor(0.0))) == pytest.approx(1.0 + (4 + 9) / 4)
    partly = Number((mean(1.0, 2.0, 1), mean(1.0, 2.0, 1)), asked=2)
    assert terms.aligned([partly, Number((mean(1.0, 2.0, 1),), asked=2)]) is None


def test_a_term_from_before_any_condition_that_some_microbatches_lack_was_replaced_after_one() -> None:
    before, after = Number((mean(1.0, 2.0, terms.BEFORE),), asked=1), Number((mean(3.0, 3.0, 1),), asked=1)
    assert terms.aligned([before, after]) is None


def test_sums_after_a_condition_count_nothing_either() -> None:
    total = Term(torch.tensor(3.0), SUM, None, 1.0, "sum", asked=1)
    columns = terms.aligned([Number((total, mean(4.0, 2.0, 2)), asked=2), Number((mean(2.0, 2.0, 2),), asked=2)])
    assert columns is not None
    assert float(terms.combined(columns, [1, 1], torch.tensor(0.0))) == pytest.approx(3.0 + 3.0)


def test_the_sum_of_no_terms_is_zero() -> None:
    assert terms.combined([], [1, 1], torch.tensor(5.0)) == 0


def test_facts_of_a_value_are_those_put() -> None:
    facts, number = Facts(2), torch.tensor(3.0)
    rows = torch.randn(2, 3, requires_grad=True) * 1
    assert facts.of(rows) is ROWS and facts.of("text") is CONSTANT and facts.of(torch.ones(2)) is CONSTANT
    facts.returned([number, rows, torch.ones(2, 3)], lambda: "a block")
    assert facts.number(number) == Unknown("a block") and facts.number(rows) is None
    facts.put(rows, Row(0))
    assert facts.number(rows[0, 0]) is not None
    single = (torch.randn(1, requires_grad=True) * 1).squeeze()
    facts.put(single, ROWS)
    assert facts.number(single) == Unknown("squeeze")


@pytest.mark.parametrize(("where", "expected"), [
    ("argument 'x'", "{'x': 1}"), ("argument 'x'['a']", "{'x': {'a': 1}}"), ("argument 'x'[1]", "{'x': (True, 1)}"),
    ("the input[0]", "(1,)"), ("the target['b']", "{'target': {'b': 1}}"), ("elsewhere", "1"),
])
def test_how_batched_would_be_written(where: str, expected: str) -> None:
    node: Any = SimpleNamespace(where=where)
    assert written(node, 1) == expected
