"""Linear layers and products with a matrix of weights: the gradients of the module, deferred."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe.deferral.accumulator import Total
from splitpipe.deferral.function import Context
from splitpipe.deferral.linear import Linear, MatMul
from tests.helpers.deferring import Call, deferred, in_more_ways, left, trained, tried
from tests.helpers.deferring import double as double

Case = tuple[Callable[[], nn.Module], tuple[int, ...]]


def by(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    """A layer that calls the function with parameters of these shapes."""
    return lambda: Call(function, **{name: torch.randn(shape) for name, shape in shapes.items()})


def each(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function called sample by sample."""
    return lambda x, *weights: torch.stack([function(sample, *weights) for sample in x])


LINEAR: dict[str, Case] = {
    "one dimension": (by(each(F.linear), w=(4, 6), b=(4,)), (7, 6)),
    "two dimensions": (lambda: nn.Linear(6, 4), (7, 6)),
    "three dimensions": (lambda: nn.Linear(6, 4), (7, 3, 6)),
    "four dimensions": (lambda: nn.Linear(6, 4), (7, 2, 3, 6)),
    "no bias": (lambda: nn.Linear(6, 4, bias=False), (7, 6)),
    "a bias for all columns": (by(F.linear, w=(4, 6), b=(1,)), (7, 6)),
    "transposed": (by(lambda x, w, b: F.linear(x, w.t(), b), w=(6, 4), b=(4,)), (7, 6)),
    "many rows": (lambda: nn.Linear(100, 80), (70, 100)),
    "no columns": (by(F.linear, w=(4, 0), b=(4,)), (7, 3, 0)),
    "bilinear form": (by(lambda x, w: F.linear(F.linear(x, w), w), w=(6, 6)), (7, 6)),
}

RIGHT: dict[str, Case] = {
    "matmul": (by(torch.matmul, w=(6, 4)), (7, 6)),
    "@": (by(lambda x, w: x @ w, w=(6, 4)), (7, 6)),
    "matmul, one dimension": (by(each(torch.matmul), w=(6, 4)), (7, 6)),
    "@, four dimensions": (by(lambda x, w: x @ w, w=(6, 4)), (7, 2, 3, 6)),
    "mm": (by(torch.mm, w=(6, 4)), (7, 6)),
    "addmm": (by(lambda x, w, b: torch.addmm(b, x, w), w=(6, 4), b=(4,)), (7, 6)),
    "many rows": (by(torch.mm, w=(100, 80)), (70, 100)),
    ".T": (by(lambda x, w: x @ w.T, w=(4, 6)), (7, 6)),
    ".mT": (by(lambda x, w: x @ w.mT, w=(4, 6)), (7, 6)),
    "transpose(0, 1)": (by(lambda x, w: x @ w.transpose(0, 1), w=(4, 6)), (7, 6)),
    "transpose(-1, -2)": (by(lambda x, w: x @ torch.transpose(w, -1, -2), w=(4, 6)), (7, 6)),
    "permute": (by(lambda x, w: x @ w.permute(1, 0), w=(4, 6)), (7, 6)),
}

#: Of a transpose by t(): the gradient is that of a linear layer.
TURNED: dict[str, Case] = {
    ".t()": (by(lambda x, w: x @ w.t(), w=(4, 6)), (7, 6)),
    "addmm of .t()": (by(lambda x, w, b: torch.addmm(b, x, w.t()), w=(4, 6), b=(4,)), (7, 6)),
    "mm of .t(), square": (by(lambda x, w: x.mm(w.t()), w=(6, 6)), (7, 6)),
}


def assert_deferred(case: Case, function: str, way: dict[str, Any]) -> None:
    make, shape = case
    model = trained(make(), torch.randn(shape), **way)
    report = deferred(model)
    assert list(report) == [row.parameter for row in model.deferral_report()]
    for why in report.values():
        assert set(why.replace(", by way of what is computed from it", "").split(", ")) == {function}


@tried(LINEAR)
def test_a_linear_layer_is_deferred(name: str, way: dict[str, Any]) -> None:
    assert_deferred(LINEAR[name], "Linear", way)


@tried(RIGHT)
def test_a_product_with_a_parameter_on_the_right_is_deferred(name: str, way: dict[str, Any]) -> None:
    assert_deferred(RIGHT[name], "MatMul", way)


@tried(TURNED)
def test_products_with_a_transpose_are_a_linear_layers(name: str, way: dict[str, Any]) -> None:
    assert_deferred(TURNED[name], "Linear", way)


@in_more_ways
def test_a_parameter_both_ways_round_is_deferred(way: dict[str, Any]) -> None:
    model = trained(by(lambda x, w: x @ w @ w.t(), w=(6, 4))(), torch.randn(7, 6), **way)
    assert deferred(model) == {"1.w": "Linear, MatMul"}


@in_more_ways
@pytest.mark.parametrize(("frozen", "expected"), [
    ("weight", {"weight": "it is frozen", "bias": "addmm: its weight is frozen"}), ("bias", {"bias": "it is frozen"}),
])
def test_frozen_parameters_get_no_gradient(frozen: str, expected: dict[str, str], way: dict[str, Any]) -> None:
    layer = nn.Linear(6, 4)
    layer.get_parameter(frozen).requires_grad_(False)
    model = trained(layer, torch.randn(7, 6), **way)
    assert left(model) == {f"1.{name}": why for name, why in expected.items()}
    assert model[1].get_parameter(frozen).grad is None


LEFT_TO_AUTOGRAD: dict[str, tuple[Case, str]] = {
    "addmm, beta": ((by(lambda x, w, b: torch.addmm(b, x, w, beta=2), w=(6, 4), b=(4,)), (7, 6)),
                    "addmm: it has more inputs than a bias and two matrices"),
    "addmm, alpha": ((by(lambda x, w, b: b.addmm(x, w, alpha=2), w=(6, 4), b=(4,)), (7, 6)),
                     "addmm: it has more inputs than a bias and two matrices"),
    "a vector of weights": ((by(lambda x, w: F.linear(x, w), w=(6,)), (7, 6)), "mv has no rule"),
    "a batch of weights": ((by(lambda x, w: x @ w, w=(2, 6, 4)), (7, 2, 3, 6)), "bmm has no rule, clone has no rule"),
    "a matrix on the left of one": ((by(lambda x, w: w.mm(x.t()).t(), w=(4, 6)), (7, 6)),
                                    "mm: what it would defer is computed in forward"),
    "a matrix with a vector": ((by(each(lambda x, w: w @ x), w=(4, 6)), (7, 6)), "mv has no rule"),
}


@tried(LEFT_TO_AUTOGRAD)
def test_products_that_the_rule_refuses_are_left_to_autograd(name: str, way: dict[str, Any]) -> None:
    (make, shape), why = LEFT_TO_AUTOGRAD[name]
    model = trained(make(), torch.randn(shape), **way)
    rows = model.deferral_report()
    assert not [row for row in rows if row.deferred], "deferred now: remove the entry"
    assert [*left(model)] == [row.parameter for row in rows]
    for found in left(model).values():  # A microbatch of one row may take another way.
        assert {*found.split(", ")} <= {*why.split(", ")}


#: With the parameters whose gradients torch computes in other ways.
OTHERS: dict[str, tuple[Case, set[str]]] = {
    "addmm to a number": ((by(lambda x, w, b: torch.addmm(b, x, w), w=(6, 4), b=()), (7, 6)), set()),
    "a matrix of biases": ((by(F.linear, w=(4, 6), b=(1, 4)), (7, 6)), {"1.b"}),
    "added to a matrix of the input": ((by(lambda x, w: torch.addmm(x, x, w), w=(6, 6)), (7, 6)), set()),
    "a matrix on the left of several": ((by(lambda x, w: w @ x, w=(4, 6)), (7, 6, 3)), set()),
}


@tried(OTHERS)
def test_functions_that_torch_computes_as_products_are_deferred(name: str, way: dict[str, Any]) -> None:
    (make, shape), autograds = OTHERS[name]
    model = trained(make(), torch.randn(shape), **way)
    assert left(model) == dict.fromkeys(autograds, "addmm has no rule")
    assert "1.w" in deferred(model)


def parts(function: type[Linear | MatMul], rows: int, width: int) -> list[tuple[Context, Tensor]]:
    found = []
    for _ in range(3):
        ctx = Context(True, (True, False))
        ctx.save_for_weight(torch.randn(rows, width))
        found.append((ctx, torch.randn(rows, width)))
    return found


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default, torch.ops.aten.addmm.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("rows", "width", "dtype", "products"), [
    pytest.param(2, 4, torch.float64, 1, id="few rows"),
    pytest.param(16, 1000, torch.float64, 1, id="few rows, wide"),
    pytest.param(200, 20, torch.float64, 1, id="few elements"),
    pytest.param(40, 200, torch.float64, 3, id="many elements"),
    pytest.param(40, 200, torch.float32, 1, id="many elements, total of another type"),
])
def test_small_microbatches_share_a_product(rows: int, width: int, dtype: torch.dtype, products: int) -> None:
    total = Total(dtype)
    some = parts(Linear, rows, width)
    with torch.no_grad(), Products() as counted:
        Linear.accumulate([total, None], some)
    assert counted.count == products
    expected = sum(grad.t() @ ctx.saved_for_weight[0] for ctx, grad in some)
    torch.testing.assert_close(total.value, expected.to(dtype))
