"""The batch's loss, made of the microbatches': means by rows, totals by counts, targets of any nesting, and faults."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors


def assert_equal(plain: nn.Module, model: SplitPipe, x: Any, y: Any, expected: Tensor) -> None:
    loss = model(x, target=y)
    torch.testing.assert_close(loss, expected)
    assert loss.shape == () and loss.dtype == expected.dtype
    loss.backward()
    expected.backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("kind", [
    int, float, lambda n: torch.tensor(n), lambda n: torch.tensor([float(n)]), lambda n: n * 1e-30, lambda n: n * 1e30
])
def test_a_count_is_any_number(kind: Any) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        return (output - target).square().sum().reshape(1), kind(output.numel())

    plain, model = twins(mlp(5), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    assert_equal(plain, model, x, y, F.mse_loss(plain(x), y) * 28 / float(kind(28)))


# Targets


@pytest.mark.parametrize("target", [0.25, 3, "text", (), {"a": (1, None)}, torch.tensor(2.0), torch.arange(7)])
def test_each_microbatch_has_its_rows_of_the_target(target: Any) -> None:
    seen: list[Any] = []

    def loss_fn(output: Tensor, given: Any) -> Tensor:
        seen.append(given.tolist() if isinstance(target, Tensor) else given)
        return output.square().mean()

    _, model = twins(mlp(5), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    model(torch.randn(7, 4), target=target).backward()
    rows = isinstance(target, Tensor) and target.dim()
    assert seen == ([[0, 1, 2], [3, 4, 5], [6]] if rows else [target] * 3)


# Faults


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (lambda y: y, r"tensor of shape \[3, 4\] and type torch.float64 as the loss: expected a tensor of one number"),
        (lambda y: 3.0, "returned a float as the loss"),
        (lambda y: None, "returned a NoneType as the loss"),
        (lambda y: y.argmax(), r"tensor of shape \[\] and type torch.int64 as the loss"),
        (lambda y: (y, 3), r"tensor of shape \[3, 4\] .* as the total of its pair"),
        (lambda y: (1.0, 3), "returned a float as the total of its pair"),
        (lambda y: (y.sum(), y), r"tensor of shape \[3, 4\] .* as the count of its pair: expected a number"),
        (lambda y: (y.sum(), "3"), "returned a str as the count of its pair"),
        (lambda y: (y.sum(), y.sum()), "returned a count that requires grad: .* Detach it"),
        (lambda y: (y.sum(), 1, 2), "returned a tuple as the loss"),
    ],
)
def test_an_invalid_return_value_of_loss_fn_is_named(found: Any, text: str) -> None:
    _, model = twins(mlp(5), "zb-v", 2, loss_fn=lambda output, _: found(output), chunks=3)
    with pytest.raises(TypeError, match=f"loss_fn returned .*{text}|loss_fn {text}") as info:
        model(torch.randn(7, 4), target=0)
    assert "loss_fn" in str(info.value)
    assert "layer 'loss_fn'" in " ".join(info.value.__notes__)


class Centred(nn.Module):
    """Keeps a running mean of the targets, in place or as a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("constant", torch.ones(4))
        self.in_place = in_place

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target - self.center * self.constant)
        if self.in_place:
            self.center.lerp_(target.mean(0), 0.1)
        else:
            self.center = self.center.lerp(target.mean(0), 0.1)
        return loss


@pytest.mark.parametrize("in_place", [False, True])
def test_a_loss_that_changes_its_buffers_is_warned_of_once(in_place: bool) -> None:
    _, model = twins(mlp(5), "1f1b", 2, loss_fn=Centred(in_place), chunks=3)
    with pytest.warns(UserWarning, match=r"loss_fn changes its buffers \('center'\): it is called for each") as told:
        for _ in range(2):
            model(torch.randn(7, 4), target=torch.randn(7, 4)).backward()
    assert len(told) == 1
    whole = twins(mlp(5), "1f1b", 2, loss_fn=Centred(in_place), chunks=1)[1]
    whole(torch.randn(7, 4), target=torch.randn(7, 4)).backward()
