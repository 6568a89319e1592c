"""A call that a layer makes for each microbatch anew is looked at once a pass; one that only looks like it, again."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.deferring import Call, deferred
from tests.deferring import apart as apart
from tests.twin import step


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def hooked(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return F.linear(x, w)


def assert_same_gradient(x: Tensor, w: Tensor) -> None:
    other = w.detach().clone().requires_grad_()
    step(lambda x: F.linear(x, other), x)
    torch.testing.assert_close(w.grad, other.grad)


def by_microbatch(model: SplitPipe, function: Callable[..., Tensor], x: Tensor) -> list[Tensor | None]:
    """The gradients of a layer's parameters, as autograd computes them from one microbatch after the other."""
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    torch.stack([function(rows, *parameters).square().sum() for rows in x.chunk(model.chunks)]).sum().backward()
    return [p.grad for p in parameters]


def assert_by_microbatch(make: Callable[[], Callable[..., Tensor]], x: Tensor, *shapes: tuple[int, ...]) -> None:
    """A function that behaves otherwise in some microbatches has the gradients that autograd gives it."""
    layer = Call(make(), **{f"p{number}": wide(*shape) for number, shape in enumerate(shapes)})
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=3, checkpoint="never")
    model(x).square().sum().backward()
    for found, expected in zip(model.parameters(), by_microbatch(model, make(), x), strict=True):
        torch.testing.assert_close(found.grad, expected)
    assert set(deferred(model)) == {name for name, _ in model.named_parameters()}


def test_a_call_with_another_argument_is_not_taken_for_the_one_before() -> None:
    def strided() -> Callable[..., Tensor]:
        strides = iter([1, 2, 1])
        return lambda x, w: F.conv1d(x, w, None, next(strides)).sum(2)

    assert_by_microbatch(strided, wide(6, 4, 8), (5, 4, 3))


def test_a_call_with_fewer_arguments_is_not_taken_for_the_one_before() -> None:
    def biased() -> Callable[..., Tensor]:
        biases = iter([1, 0, 1])
        return lambda x, w, b: F.linear(x, w, *[b] * next(biases))

    assert_by_microbatch(biased, wide(6, 4), (5, 4), (5,))


def test_a_bias_that_is_frozen_between_microbatches_gets_no_gradient_of_the_later_ones() -> None:
    def freezing() -> Callable[..., Tensor]:
        needs = iter([True, False, False])

        def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            try:
                return F.linear(x, w, b.requires_grad_(next(needs)))
            finally:
                b.requires_grad_()

        return call

    assert_by_microbatch(freezing, wide(6, 4), (5, 4), (5,))


def test_an_equal_argument_of_another_type_gives_torchs_own_error() -> None:
    strides = iter([1, 1.0])
    layer = Call(lambda x, w: F.conv1d(x, w, None, next(strides)), w=wide(5, 4, 3))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    with pytest.raises(TypeError, match="conv1d"):
        model(wide(4, 4, 8))


def test_a_microbatch_under_hooks_of_its_own_is_autograds_though_the_one_before_was_caught() -> None:
    calls = iter([F.linear, hooked, F.linear])
    model = SplitPipe(nn.Sequential(Call(lambda x, w: next(calls)(x, w), w=wide(6, 6))), [1], devices=["cpu"], chunks=3,
                      checkpoint="never")
    x = wide(6, 6)
    step(model, x)
    why = "Linear; by autograd: Linear: it runs under saved-tensor hooks of its own"
    assert deferred(model) == {"0.w": why}
    assert_same_gradient(x, model[0].w)
