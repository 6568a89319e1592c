"""Corners where a deferred gradient could differ from autograd's without a word, or a model could be lost."""
from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitFunction, SplitPipe
from tests.helpers import scheduled
from tests.helpers.deferring import Call, drop_in, in_more_ways, trained
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors, twins


class Shift(SplitFunction):
    """x + weight, whose weight gradient autograd is to sum to the weight's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        return x + weights[0]

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Any]:
        return (grad_output,)


class Itself(SplitFunction):
    """The weight, times a number that is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        weight = weights[0]
        assert weight is not None
        return weight

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        return torch.zeros_like(grad_output)

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Any]:
        return (grad_output,)


@in_more_ways
def test_an_expanded_gradient_is_summed(way: dict[str, Any]) -> None:
    trained(Call(Shift.apply, w=torch.randn(4)), torch.randn(7, 4), **way)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_computed_weight_that_gets_no_gradient_goes_no_further(name: str) -> None:
    Silent = type("Silent", (Shift,), {"backward_weight": staticmethod(lambda ctx, grad: (None,))})
    layer = Call(lambda x, w: Silent.apply(x, w * 2), w=torch.randn(4))
    _, model = scheduled.twins(nn.Sequential(nn.Linear(4, 4), layer), name, chunks=2)
    scheduled.step(torch.randn(4, 4), lambda x: model(x, target=0.25))
    assert layer.w.grad is None


@drop_in
def test_a_function_may_return_its_weight(way: dict[str, Any]) -> None:
    model = SplitPipe(nn.Sequential(Call(Itself.apply, w=torch.randn(2, 4))), [1], devices=["cpu"], chunks=2, **way)
    for _ in range(2):
        model(torch.randn(4, 4)).sum().backward()
    assert model[0].w.is_leaf
    torch.testing.assert_close(model[0].w.grad, torch.full((2, 4), 4.0))


class Storing(nn.Module):
    """Keeps its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


def test_a_layer_that_keeps_its_output_does_not_keep_the_model() -> None:
    layer = Storing()
    reference = weakref.ref(layer)
    model = SplitPipe(nn.Sequential(layer, nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    del layer
    model(torch.randn(4, 4)).sum().backward()
    del model
    gc.collect()
    assert reference() is None


def test_a_weight_that_no_input_gradient_needs_may_be_written_to() -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), chunks=2, checkpoint="never")
    x = torch.randn(4, 4)
    for m in (plain, model):
        y = m(x)
        with torch.no_grad():
            m[0].weight.mul_(2)
        y.sum().backward()
    assert_same_tensors(model, plain)


class Mine(Tensor):
    """Has a say in what attention does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.multi_head_attention_forward:
            return args[0].as_subclass(Tensor) * 0 + 42, None
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_tensor_of_a_class_of_its_own_is_asked_about_attention(checkpoint: Any) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x.as_subclass(Mine)
            return self.attention(x, x, x)[0]

    plain, model = twins(nn.Sequential(Attention()), checkpoint=checkpoint)
    x = torch.randn(2, 3, 4, requires_grad=True)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(("function", "shape"), [
    (lambda x, w: nn.functional.embedding(x.abs().long(), w * 2, scale_grad_by_freq=True), (5, 4)),
    (lambda x, w: nn.functional.linear(x, w * 2, x.sum(0)), (4, 4)),
], ids=["a computed table that counts", "a computed bias"])
def test_what_a_rule_refuses_is_not_reported_as_deferred(function: Any, shape: tuple[int, ...]) -> None:
    layer = Call(function, w=torch.randn(shape))
    SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")(x := torch.randn(4, 4))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=1, checkpoint="never")
    model(x).sum().backward()
    assert not any(row.deferred for row in model.deferral_report())
