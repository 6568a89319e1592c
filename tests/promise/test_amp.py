"""Mixed precision with a schedule: half precision with the loop's scaler, bfloat16 as drop-in has it."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.modules import module_of
from tests.helpers.scheduled import loss_of, twins
from tests.helpers.twin import assert_same_tensors

WAYS = pytest.mark.parametrize("options", [{}, {"backward": "autograd"}, {"checkpoint": "always"}],
                               ids=["split", "autograd", "checkpointed"])


def layers(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width),
                         nn.Linear(width, width))


def scheduled(module: nn.Sequential, **options: Any) -> SplitPipe:
    return SplitPipe(copy.deepcopy(module), [2, 1, 1, 1], devices=["cpu"] * 2, chunks=3,
                     **{"schedule": "zb-v", "loss_fn": mse, **options})


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def gradients(module: nn.Module) -> list[Tensor]:
    found: list[Any] = [parameter.grad for parameter in module.parameters()]
    return found


def assert_near(found: list[Tensor], expected: list[Tensor], share: float) -> None:
    for x, y in zip(found, expected):
        assert x.isfinite().all()
        assert (x - y).norm() <= share * y.norm(), f"{(x - y).norm()} of {y.norm()}"


def half(model: nn.Module, scaler: Any, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        loss = model(x, target=y)
    scaler.scale(loss * factor).backward()
    return loss.detach()


def tiny(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target) * 1e-7


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A total, and the count of what is positive."""
    return ((output.float() - target).square() * (target > 0)).sum(), (target > 0).sum()


def averaged(output: Tensor, target: Tensor) -> Tensor:
    total, count = counted(output, target)
    return total / count


@WAYS
@pytest.mark.parametrize(("loss_fn", "expected_fn", "scale", "share"), [
    (mse, mse, 2.0**10, 0.01), (tiny, tiny, 2.0**20, 0.02), (counted, averaged, 2.0**10, 0.01)])
def test_half_precision_by_a_scaler_has_the_gradients_of_single_precision(loss_fn, expected_fn, scale, share, options):
    """Tiny ones do not underflow; those of several batches add up, scaled by what the user scales them by."""
    plain = layers()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=scale)
    model = scheduled(plain, grad_scaler=scaler, loss_fn=loss_fn, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (7, 3):
        x, y = torch.randn(rows, 16), torch.randn(rows, 16)
        expected = expected_fn(plain(x), y)
        (expected / 2).backward()
        torch.testing.assert_close(half(model, scaler, x, y, factor=0.5), expected.detach(), rtol=0.01, atol=0.01)
    scaler.unscale_(optimizer)
    assert_near(gradients(model), gradients(plain), share)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_half_precision_without_a_scaler_is_refused(scaler: Any) -> None:
    model = scheduled(layers(), grad_scaler=scaler)
    x, y = torch.randn(7, 16), torch.randn(7, 16)
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match=r"grad_scaler=scaler.*bfloat16"):
        model(x, target=y)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert model(x, target=y).isfinite()
    model(x, target=y).backward()


@pytest.mark.parametrize(("scaler", "dtype", "share"), [
    (torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=False), torch.float32, 1e-6),
    (torch.amp.GradScaler("cpu", init_scale=1024.0), torch.float32, 1e-6), (None, torch.bfloat16, 0.05),
], ids=["a disabled scaler", "a scaler without autocast", "layers of half precision"])
def test_without_autocast_a_step_is_that_of_the_module(scaler: Any, dtype: torch.dtype, share: float) -> None:
    plain = layers().to(dtype)
    model = scheduled(plain, grad_scaler=scaler)
    x, y = torch.randn(7, 16).to(dtype), torch.randn(7, 16)
    mse(plain(x), y).backward()
    model(x, target=y).backward()
    assert all(gradient.dtype is dtype for gradient in gradients(model))
    assert_near(gradients(model), gradients(plain), share)


@WAYS
def test_bfloat16_is_that_of_drop_in(options: dict[str, Any]) -> None:
    plain = layers()
    model = scheduled(plain, **options)
    dropin = SplitPipe(copy.deepcopy(plain), [3, 2], devices=["cpu"] * 2, chunks=3,
                       **{"checkpoint": "never", **options})
    x, y = torch.randn(7, 16), torch.randn(7, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = mse(dropin(x), y), model(x, target=y)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_near(gradients(model), gradients(dropin), 0.01)


@pytest.mark.draws  # For all that is known, so that microbatches run in this thread, under its autocast.
def test_in_one_graph_gradients_of_microbatches_are_added_in_single_precision() -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"], chunks=4, backward="autograd")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.tensor([[256.0], [1.0], [1.0], [1.0]])).sum().backward()
    assert model[0].weight.grad == 259  # bfloat16 would have 256.


@pytest.mark.draws
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_in_a_first_call_gradients_are_not_computed_within_its_autocast(name: str) -> None:
    def exact(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())

    layers = [module_of(exact, layer=nn.Linear(8, 8)) for _ in range(2)]
    plain, model = twins(nn.Sequential(*layers), name, chunks=1)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(each, x) for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert_same_tensors(model, plain)
