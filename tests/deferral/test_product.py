"""The product of a weight gradient: equal by every kernel, and by oneDNN's only where nothing records."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from splitpipe.deferral import product as module
from splitpipe.deferral.product import add_product, product

FAST = "mkldnn::_linear_pointwise"
needs_onednn = pytest.mark.skipif(not module._available(), reason="torch has no oneDNN product here")


def operators(a: Tensor, b: Tensor, within: AbstractContextManager[object] | None = None) -> set[str]:
    """The operators that a product calls."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found, within or nullcontext():
        product(a, b)
    return {event.name for event in found.events()}


def large(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 192, generator=generator, dtype=torch.float64).t()
    b = torch.randn(256, 256, generator=generator, dtype=torch.float64)
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("strides", ["rows", "columns"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (0, 4, 5), (4, 5, 0), (192, 256, 256), (999, 9, 999)]
)
@torch.no_grad()
def test_the_product_is_that_of_the_matrices(m: int, n: int, k: int, strides: str) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    if strides == "columns":
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    total = torch.randn(m, n)
    expected = a.double() @ b.double()
    torch.testing.assert_close(product(a, b), expected.float(), rtol=1e-4, atol=1e-4)
    sum_ = total.clone()
    add_product(sum_, a, b)
    torch.testing.assert_close(sum_, (total.double() + expected).float(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_is_no_number_stays_none() -> None:
    a, b = large()
    a[3, 5], a[4, 6] = float("nan"), float("inf")
    y = product(a, b)
    assert y[3].isnan().all()
    assert not y[4].isfinite().any()
    assert y[[0, 1, 2, 5]].isfinite().all()


@needs_onednn
@torch.no_grad()
def test_large_products_are_onednns() -> None:
    a, b = large()
    assert FAST in operators(a, b)
    assert FAST not in operators(a[:, :8], b[:8])


@needs_onednn
def test_autograd_sees_every_product_that_it_records() -> None:
    a, b = (x.requires_grad_() for x in large())
    assert FAST not in operators(a, b)
    assert product(a, b).requires_grad


@needs_onednn
@torch.no_grad()
def test_a_counter_of_operations_counts() -> None:
    a, b = large()
    with FlopCounterMode(display=False) as counter:
        product(a, b)
    assert counter.get_total_flops() == 2 * 192 * 256 * 256


@needs_onednn
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@torch.no_grad()
def test_who_switches_onednn_off_has_none() -> None:
    a, b = large()
    assert FAST not in operators(a, b, torch.backends.mkldnn.flags(enabled=False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@torch.no_grad()
def test_other_types_are_torchs(dtype: torch.dtype) -> None:
    a, b = large(dtype)
    assert FAST not in operators(a, b)
    assert product(a, b).dtype == dtype
