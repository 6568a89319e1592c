"""Sums of gradients that autograd gives: in place from the third summand on, and nobody else's memory is written to."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.engine.ops import StageOps
from tests.helpers.scheduled import mean

SHAPES = (3,), (2, 4)


def weights() -> list[Tensor]:
    """Two of them."""
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def gradients(value: float) -> list[Tensor]:
    """Of these."""
    return [torch.full(shape, value) for shape in SHAPES]


def found(sums: Sums) -> list[Any]:
    """The values of the sums."""
    return [total.value for _, total in sums]


def test_later_sums_are_made_in_place() -> None:
    sums, its = Sums(), weights()
    first = gradients(1.0)
    with torch.no_grad():
        sums.add(its, first)
        sums.add(its, gradients(2.0))
        places = [value.data_ptr() for value in found(sums)]
        for _ in range(3):
            sums.add(its, gradients(4.0))
    assert [value.data_ptr() for value in found(sums)] == places
    for value, own, shape in zip(found(sums), first, SHAPES):
        assert torch.equal(value, torch.full(shape, 15.0))
        assert torch.equal(own, torch.ones(shape))


@pytest.mark.parametrize("at", range(4))
def test_a_gradient_that_is_missing_once(at: int) -> None:
    sums, its = Sums(), weights()
    with torch.no_grad():
        for number in range(4):
            sums.add(its, [None if number == at else torch.ones(3), torch.ones(2, 4)])
    assert torch.equal(found(sums)[0], torch.full((3,), 3.0))
    assert torch.equal(found(sums)[1], torch.full((2, 4), 4.0))


def test_other_weights_from_one_time_to_the_next() -> None:
    sums, (one, other) = Sums(), weights()
    with torch.no_grad():
        sums.add([one, other], gradients(1.0))
        sums.add([other], gradients(2.0)[1:])
        sums.add([other, one], gradients(4.0)[::-1])
        sums.add([one, other], gradients(8.0))
    assert [value.unique().item() for value in found(sums)] == [13.0, 15.0]


@pytest.mark.parametrize("at", range(3))
def test_a_sparse_gradient_among_dense_ones(at: int) -> None:
    sums, its = Sums(), weights()
    with torch.no_grad():
        for number in range(4):
            one, other = gradients(1.0)
            sums.add(its, [one, other.to_sparse() if number == at else other])
    assert [value.to_dense().unique().item() for value in found(sums)] == [4.0, 4.0]


def test_a_schedule_adds_to_its_sums_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[list[int]] = []
    given = StageOps.backward

    def backward(self: Any, *args: Any, **more: Any) -> Any:
        grads = given(self, *args, **more)
        places.append([total.value.data_ptr() for _, total in self._sums])
        return grads

    monkeypatch.setattr(StageOps, "backward", backward)
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4)), balance=[1], devices=["cpu"], chunks=5, schedule="1f1b",
                      loss_fn=mean, backward="autograd")
    model(torch.randn(5, 4), target=0.25)
    assert len(places) == 5 and places[1] == places[2] == places[3] == places[4]


@pytest.mark.parametrize("layout", [torch.empty(3, 4), torch.empty(4, 3).t(), torch.empty(3, 4, device="meta")],
                         ids=["contiguous", "transposed", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_begins_in_memory_with_the_weights_layout(layout: Tensor, dtype: torch.dtype) -> None:
    product, added = Total(dtype, layout.shape, layout), Total(dtype, layout.shape, layout)
    bias = Total(dtype, torch.Size((4,)), torch.empty(4))
    memory = []
    with torch.no_grad():
        for total in product, added, bias:
            assert total.lacks_memory
            total.allocate(torch.device("cpu"))
            assert not total.lacks_memory and total._memory is not None
            memory.append(total._memory.data_ptr())
        for total in product, added, bias:
            for _ in range(2):
                if total is product:
                    total.add_product(torch.ones(3, 2), torch.ones(2, 4))
                elif total is added:
                    total.add(torch.ones(3, 4))
                else:
                    total.add_rows(torch.ones(3, 4))
    for total, value, address in zip((product, added, bias), (4.0, 2.0, 6.0), memory):
        assert total.value is not None and not total.lacks_memory
        torch.testing.assert_close(total.value, torch.full_like(total.value, value), rtol=0, atol=0)
        assert total.value.dtype is dtype and total.value.data_ptr() == address
        if total is not bias:
            assert total.value.stride() == layout.stride()


def test_a_sum_with_allocated_memory_accepts_sparse_gradients_and_other_shapes() -> None:
    for grad in torch.ones(2, 3).to_sparse(), torch.ones(2, 3, requires_grad=True) * 1:
        total = Total(torch.float32, torch.Size((2, 3)), torch.empty(2, 3))
        total.allocate(torch.device("cpu"))
        total.add(grad)
        assert total.value is grad
    rows = Total(torch.float32, torch.Size((1,)), torch.empty(1))
    rows.allocate(torch.device("cpu"))
    rows.add_rows(torch.ones(2, 3))
    assert rows.value is not None and rows.value.tolist() == [6.0]
