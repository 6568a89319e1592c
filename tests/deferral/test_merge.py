"""What is concatenated, and how gradients are added."""
from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.deferral import accumulator
from splitpipe.deferral.accumulator import Total, together
from tests.helpers.deferring import apart as apart


def pair(rows: int, width: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width, dtype=dtype), torch.randn(rows, 3, dtype=dtype)


def lengths(pairs: list[tuple[Tensor, Tensor]]) -> list[int]:
    """How many pairs each run has; together they are the pairs, in order."""
    runs = [list(run) for run in together(pairs)]
    assert [id(found) for run in runs for found in run] == [id(given) for given in pairs]
    return [len(run) for run in runs]


@pytest.mark.parametrize(("rows", "bound", "expected"), [
    ([], None, []), ([4, 4, 1], None, [3]),
    ([1] * 5, 80, [2, 2, 1]),  # A row of a pair has 40 bytes.
    ([1, 3, 1, 1], 80, [1, 1, 2]), ([3, 3, 1], 80, [1, 1, 1]), ([2, 2, 1, 2, 1], 120, [1, 2, 2]),
])
def test_a_run_grows_to_the_bound(
    rows: list[int], bound: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound is not None:
        monkeypatch.setattr(accumulator, "_TOGETHER", bound)
    assert lengths([pair(each) for each in rows]) == expected


def test_other_shapes_and_types_start_a_run() -> None:
    pairs = [pair(1), pair(2), pair(1, 5), pair(1, 5, torch.float32), pair(2, 5, torch.float32), pair(1)]
    assert lengths(pairs) == [2, 1, 2, 1]
    x = torch.randn(2, 3)
    assert lengths([(x, torch.randn(2, 4)), (x, torch.randn(2, 5))]) == [1, 1]


def total(*gradients: Tensor | None, dtype: torch.dtype = torch.float64) -> Total:
    sum_ = Total(dtype)
    with torch.no_grad():
        for gradient in gradients:
            sum_.add(gradient)
    return sum_


def test_nothing_adds_nothing() -> None:
    assert total().value is None and total(None, None).value is None
    assert Total(torch.float32).scaled(torch.ones(()), True) is None
    torch.testing.assert_close(total(None, torch.ones(2), None).value, torch.ones(2), check_dtype=False)


def test_gradients_are_taken_as_they_are_and_never_written_to() -> None:
    gradients = [torch.randn(3, 3, dtype=torch.float64) for _ in range(4)]
    before = [x.clone() for x in gradients]
    assert total(gradients[0]).value is gradients[0]
    torch.testing.assert_close(total(*gradients).value, torch.stack(before).sum(0))
    sum_ = total(gradients[0])
    with torch.no_grad():
        sum_.add_product(*gradients[1:3])
    torch.testing.assert_close(sum_.value, before[0] + before[1] @ before[2])
    assert all(map(torch.equal, gradients, before))


def test_a_first_product_belongs_to_the_total() -> None:
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    sum_ = Total(torch.float64)
    with torch.no_grad():
        sum_.add_product(a, b)
        first = sum_.value
        sum_.add_product(a, b)
        sum_.add(torch.ones(2, 2, dtype=torch.float64))
    assert sum_.value is first
    torch.testing.assert_close(first, 2 * a @ b + 1)


def test_a_fresh_gradient_belongs_to_the_total() -> None:
    first = torch.ones(3, dtype=torch.float64)
    sum_ = Total(torch.float64)
    with torch.no_grad():
        sum_.add(first, fresh=True)
        sum_.add(torch.ones(3, dtype=torch.float64))
    assert sum_.value is first
    assert first.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("way", [{"checkpoint": "never", "stash_limit": 0}, {"schedule": "zb-h1"}])
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv1d(4, 6, 3), torch.randn(6, 4, 9)),
        (nn.Linear(4, 6), torch.randn(6, 4)),
        (nn.Embedding(11, 6), torch.randint(11, (6, 5))),
    ],
)
def test_sums_reuse_the_memory_of_kernels(
    layer: nn.Module, x: Tensor, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[Total, list[Tensor | None]] = defaultdict(list)

    def noting(add: Any) -> Any:
        def noted(self: Total, *arguments: Any, **options: Any) -> None:
            add(self, *arguments, **options)
            values[self].append(self.value)

        return noted

    for name in "add", "add_product":
        monkeypatch.setattr(Total, name, noting(getattr(Total, name)))
    scheduled = "schedule" in way
    options = {"loss_fn": lambda y, target: y.mean()} if scheduled else {}
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=3, **way, **options)
    loss = model(x, target=torch.zeros(len(x))) if scheduled else model(x).sum()
    loss.backward()
    count = len([*layer.parameters()])
    several = [found for found in values.values() if len(found) >= 3]
    assert len(several) == count
    for found in several:
        assert all(value is found[0] for value in found)
    # A leaf's sum takes over the total's.
    assert len({value.data_ptr() for found in values.values() for value in found if value is not None}) == count


def test_a_converted_gradient_belongs_to_the_total() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    sum_ = total(x, dtype=torch.float32)
    first = sum_.value
    with torch.no_grad():
        sum_.add(x)
    assert sum_.value is first and first.dtype is torch.float32
    assert torch.equal(x, torch.ones_like(x))


def test_products_of_another_type_are_added_in_the_weights_type() -> None:
    a, b = torch.ones(2, 300, dtype=torch.bfloat16), torch.ones(300, 2, dtype=torch.bfloat16)
    sum_ = Total(torch.float32)
    with torch.no_grad():
        for _ in range(3):
            sum_.add_product(a[:, :1], b[:1])
            sum_.add_product(a[:, :256], b[:256])
    torch.testing.assert_close(sum_.value, torch.full((2, 2), 771.0))  # bfloat16 would have 772.


def test_nothing_is_written_in_place_where_autograd_records() -> None:
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    sum_ = Total(torch.float64)
    values: list[Tensor | None] = []
    for add in (lambda: sum_.add(x), lambda: sum_.add(x), lambda: sum_.add(x), lambda: sum_.add_product(x, x)):
        add()
        values.append(sum_.value)
    assert len({id(value) for value in values}) == 4
    assert values[-1] is not None
    (gradient,) = torch.autograd.grad(values[-1].sum(), x)
    torch.testing.assert_close(gradient, 3 + x.sum(1).expand(3, 3) + x.sum(0)[:, None])


def test_sparse_gradients_are_added() -> None:
    x = torch.eye(2, dtype=torch.float64)
    for gradients in ([x, x.to_sparse(), x], [x.to_sparse()] * 3, [x.to_sparse(), x, x], [x.to_sparse()] * 2 + [x]):
        found = total(*gradients).value
        assert found is not None
        torch.testing.assert_close(found.to_dense(), 3 * x)


def test_an_expanded_gradient_is_summed() -> None:
    sum_ = Total(torch.float64, torch.Size([3]))
    with torch.no_grad():
        for rows in (2, 1, 4):
            sum_.add(torch.ones(rows, 3, dtype=torch.float64))
    torch.testing.assert_close(sum_.value, torch.full((3,), 7.0, dtype=torch.float64))


@pytest.mark.parametrize(("gradient", "words"), [
    (torch.ones(4, dtype=torch.float64), r"has shape \[4\]: expected the weight's, \[3\]"),
    (torch.ones(3, dtype=torch.complex128), "is torch.complex128: expected torch.float64"),
])
def test_a_gradient_that_does_not_fit_is_an_error(gradient: Tensor, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        Total(torch.float64, torch.Size([3])).add(gradient)


@pytest.mark.parametrize("owned", [False, True])
def test_a_sum_that_joins_an_empty_one(owned: bool) -> None:
    gradient = torch.ones(3)
    other, sum_ = Total(torch.float32), Total(torch.float32)
    with torch.no_grad():
        other.add(gradient, fresh=owned)
        sum_.join(other)
        sum_.add(torch.ones(3))
    assert torch.equal(sum_.value, torch.full((3,), 2.0))
    assert (sum_.value is gradient) is owned
