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
from tests.helpers.deferring import Call, in_more_ways, trained
from tests.helpers.deferring import double as double
from tests.helpers.twin import Nothing, assert_same_tensors, assert_transparent, twins


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
def test_a_gradient_that_is_expanded_is_summed_to_the_weights_shape(way: dict[str, Any]) -> None:
    trained(Call(Shift.apply, w=torch.randn(4)), torch.randn(7, 4), **way)


@in_more_ways
def test_a_gradient_of_another_shape_is_an_error(way: dict[str, Any]) -> None:
    layer = Call(Shift.apply, w=torch.randn(1, 4, 1))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, **way)
    y = model(torch.randn(4, 1, 4, 1))
    Wrong = type("Wrong", (Shift,), {"backward_weight": staticmethod(lambda ctx, grad: (grad.flatten(),))})
    y = SplitPipe(nn.Sequential(Call(Wrong.apply, w=torch.randn(4))), [1], devices=["cpu"], chunks=2, **way)(
        torch.randn(4, 4)
    )
    with pytest.raises(RuntimeError, match=r"has shape \[8\]: expected the weight's, \[4\]"):
        y.sum().backward()


def test_a_gradient_that_is_complex_is_an_error() -> None:
    Wrong = type("Wrong", (Shift,), {"backward_weight": staticmethod(lambda ctx, grad: (grad * 1j,))})
    model = SplitPipe(nn.Sequential(Call(Wrong.apply, w=torch.randn(4))), [1], devices=["cpu"], chunks=2,
                      checkpoint="never")
    with pytest.raises(RuntimeError, match="complex128: expected torch.float64"):
        model(torch.randn(4, 4)).sum().backward()


@in_more_ways
def test_a_layer_whose_output_gets_no_gradient_has_none(way: dict[str, Any]) -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + Nothing.apply(self.unused(x))

    model = assert_transparent(nn.Sequential(Stopped()), torch.randn(7, 4), [1], chunks=3, **way)
    assert {row.parameter for row in model.deferral_report() if row.deferred} >= {"0.used.weight", "0.unused.weight"}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_computed_weight_that_gets_no_gradient_goes_no_further(name: str) -> None:
    Silent = type("Silent", (Shift,), {"backward_weight": staticmethod(lambda ctx, grad: (None,))})
    layer = Call(lambda x, w: Silent.apply(x, w * 2), w=torch.randn(4))
    _, model = scheduled.twins(nn.Sequential(nn.Linear(4, 4), layer), name, chunks=2)
    scheduled.step(torch.randn(4, 4), lambda x: model(x, target=0.25))
    assert layer.w.grad is None


@in_more_ways
def test_a_function_that_returns_its_weight_leaves_the_weight_a_leaf(way: dict[str, Any]) -> None:
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


def test_a_type_that_does_not_fit_is_torchs_error() -> None:
    for layer, x in (
        (nn.Conv1d(2, 2, 1), torch.randn(2, 2, 3)),
        (nn.Linear(3, 3), torch.randn(2, 3)),
    ):
        layer.bias.data = layer.bias.data.float()
        plain, model = twins(nn.Sequential(layer), checkpoint="never")
        with pytest.raises(RuntimeError) as expected:
            plain(x)
        with pytest.raises(RuntimeError) as found:
            model(x)
        assert str(found.value) == str(expected.value)


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


def test_a_table_computed_for_each_microbatch_is_not_counted_by_us() -> None:
    layer = Call(lambda x, w: nn.functional.embedding(x, w * 2, scale_grad_by_freq=True), w=torch.randn(5, 4))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    model(torch.randint(0, 5, (4, 3))).sum().backward()
    (row,) = model.deferral_report()
    assert not row.deferred


def test_a_call_that_is_refused_for_its_bias_is_not_reported_as_deferred() -> None:
    layer = Call(lambda x, w: nn.functional.linear(x, w * 2, x.sum(0)), w=torch.randn(4, 4))
    model = trained(layer, torch.randn(7, 4), chunks=1, checkpoint="never")
    assert not any(row.deferred for row in model.deferral_report())


def test_a_parameter_that_is_an_input_is_reported_as_one() -> None:
    layer = Call(lambda x, p, w: x + nn.functional.linear(p, w), p=torch.randn(4), w=torch.randn(4, 4))
    model = trained(layer, torch.randn(7, 4), checkpoint="never")
    assert {row.parameter: row.why for row in model.deferral_report()}["1.p"] == "mm has no rule"


def test_a_look_at_a_parameter_is_no_use_of_it() -> None:
    layer = Call(lambda x, w: x * w.numel() + float(w.is_complex()) + w.detach().sum(), w=torch.randn(4))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], checkpoint="never")
    model(torch.randn(4, 4))
    (row,) = model.deferral_report()
    assert "no function was seen" in row.why
