"""Sums of gradients: nobody else's memory is written to, and products are added in the weight's type."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.backward.split_backward import InputGradients, WeightGradStore
from splitpipe.backward.weight_gradients import Total, linear
from tests.helpers.deferring import double as double


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def add_product(total: Total, grad: Tensor, x: Tensor) -> None:
    """W of a linear layer: adds ``grad.t() @ x``."""
    linear([total, None], [(SimpleNamespace(saved_for_weight=(x,), way=(True,)), grad)])


def test_gradients_are_taken_as_they_are_and_never_written_to() -> None:
    given = [torch.randn(3, 3) for _ in range(3)]
    before, total = [x.clone() for x in given], Total(given[0])
    total.add(None)
    assert total.value is None
    total.add(given[0])
    assert total.value is given[0]
    add_product(total, *given[1:])
    torch.testing.assert_close(total.value, before[0] + before[1].t() @ before[2])
    assert all(map(torch.equal, given, before))


def test_gradients_that_are_added_together_are_those_of_the_weights_given_and_never_written_to() -> None:
    weights, given = [torch.empty(2) for _ in range(3)], [[torch.ones(2)] * 2 for _ in range(3)]
    store = WeightGradStore(None)
    for own, grads in zip((weights[:2], weights[:2], weights[1:]), given):
        store.add(0, InputGradients([], [*zip(own, grads)], []))
    sums: list[Any] = [store.total(x).value for x in weights]
    assert [x.tolist() for x in sums] == [[2.0] * 2, [3.0] * 2, [1.0] * 2]
    assert all(x.tolist() == [1.0, 1.0] for grads in given for x in grads)


def test_products_of_another_type_are_added_in_the_weights_type() -> None:
    a, b = torch.ones(2, 300, dtype=torch.bfloat16), torch.ones(300, 2, dtype=torch.bfloat16)
    total = Total(torch.empty(2, 2, dtype=torch.float32))
    for _ in range(3):
        add_product(total, a[:, :1].t(), b[:1])
        add_product(total, a[:, :256].t(), b[:256])
    torch.testing.assert_close(total.value, torch.full((2, 2), 771.0, dtype=torch.float32))  # bfloat16 would have 772.


@pytest.mark.parametrize("allocated", [False, True])
def test_an_expanded_gradient_is_summed_and_one_that_does_not_fit_is_an_error(allocated: bool) -> None:
    total = Total(torch.empty(3))
    if allocated:
        total.allocate()
    with pytest.raises(RuntimeError, match=r"size \{\[3\]\} is not expandable to size \{\[4\]\}"):
        total.add(torch.ones(4))
    for rows in (2, 1, 4):
        total.add(torch.ones(rows, 3))
    torch.testing.assert_close(total.value, torch.full((3,), 7.0))
