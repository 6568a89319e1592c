"""A call that a layer makes for each microbatch anew is looked at once a pass; one that only looks like it, again."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.deferral.catch import Catch
from splitpipe.deferral.linear import Linear
from tests.helpers.deferring import Call, deferred, left
from tests.helpers.deferring import apart as apart
from tests.helpers.twin import step


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def hooked(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return F.linear(x, w)


def assert_same_gradient(x: Tensor, w: Tensor, b: Tensor | None = None) -> None:
    other = w.detach().clone().requires_grad_()
    step(lambda x: F.linear(x, other, b), x)
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


def test_no_rule_is_asked_about_a_call_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def call(*args: Any) -> Tensor | None:
        nonlocal asked
        asked += 1
        return given(*args)

    given = Catch.call
    monkeypatch.setattr(Catch, "call", call)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Call(torch.mm, w=torch.randn(4, 4)))
    SplitPipe(layers, [3], devices=["cpu"], chunks=4, checkpoint="never")(torch.randn(8, 4)).sum().backward()
    assert asked == 2


def test_no_rule_is_asked_twice_about_a_call_that_would_take_longer_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def pays(*args: Any) -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(Linear, "pays", pays)
    model = SplitPipe(nn.Sequential(nn.Linear(6, 6).double()), [1], devices=["cpu"], chunks=4, checkpoint="never")
    x = wide(8, 6)
    step(model, x)
    assert asked == 1
    assert set(left(model).values()) == {"Linear: its gradients would take longer apart"}
    assert_same_gradient(x, model[0].weight, model[0].bias)


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


def test_a_sparse_input_is_not_taken_for_the_dense_one_before() -> None:
    def either() -> Callable[..., Tensor]:
        sparse = iter([False, True, False])
        return lambda x, w: torch.mm(x.to_sparse() if next(sparse) else x, w)

    assert_by_microbatch(either, wide(6, 4), (4, 5))


class Own(Tensor):
    """A class of its own."""


@pytest.mark.parametrize("change", [Tensor.to_sparse, lambda x: x.as_subclass(Own)], ids=["sparse", "a subclass"])
def test_an_input_of_another_class_is_not_taken_for_the_one_before(change: Callable[[Tensor], Tensor]) -> None:
    changes = iter([lambda x: x, change])
    layer = Call(lambda x, w: torch.mm(next(changes)(x), w).as_subclass(Tensor), w=wide(4, 5))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    model(wide(6, 4))
    assert deferred(model) == {"0.w": "MatMul; by autograd: MatMul: its input is of a class of its own"}


def test_an_argument_that_is_changed_in_place_is_not_taken_for_the_one_before() -> None:
    def padded() -> Callable[..., Tensor]:
        widths, padding = iter([0, 1, 2]), [0]

        def call(x: Tensor, w: Tensor) -> Tensor:
            padding[:] = [next(widths)]
            return F.conv1d(x, w, None, 1, padding).sum(2)

        return call

    assert_by_microbatch(padded, wide(6, 4, 8), (5, 4, 3))


class Computed(nn.Module):
    """Writes what it computes for each microbatch into a frozen parameter, or a buffer, and multiplies by that."""

    def __init__(self, parameter: bool) -> None:
        super().__init__()
        self.base, self.scale = nn.Parameter(wide(4, 4)), nn.Parameter(wide(4, 1))
        if parameter:
            self.weight = nn.Parameter(wide(4, 4), requires_grad=False)
        else:
            self.register_buffer("weight", wide(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach_()
        self.weight.copy_(self.base * self.scale if x[0, 0] > 0 else self.base)
        return F.linear(x, self.weight)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("parameter", [True, False])
def test_a_weight_that_each_microbatch_computes_in_place_is_not_that_of_the_one_before(
    parameter: bool, schedule: str
) -> None:
    x = wide(8, 4)
    x[:, 0] = torch.tensor([1.0, -1.0] * 2).repeat_interleave(2)
    layers = nn.Sequential(Computed(parameter), nn.Linear(4, 2, dtype=torch.float64))
    other = copy.deepcopy(layers)
    torch.cat([other(rows) for rows in x.chunk(4)]).square().mean().backward()
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint="never", schedule=schedule,
                      loss_fn=lambda y, _: y.square().mean())
    model(x, target=x).backward()
    for found, expected in zip(layers.parameters(), other.parameters(), strict=True):
        assert found.is_leaf is expected.is_leaf
        if found.is_leaf:
            torch.testing.assert_close(found.grad, expected.grad)


class Sometimes(nn.Module):
    """Multiplies by what it computes, or by its own parameter, which it keeps both in the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.weight = nn.Parameter(wide(4, 4)), nn.Parameter(wide(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach_()
        if x[0, 0] > 0:
            self.weight.copy_(self.base)
        else:
            self.weight.requires_grad_()
        return F.linear(x, self.weight)


def test_a_parameter_is_not_what_the_microbatch_before_computed_in_its_place() -> None:
    x = wide(4, 4)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    layer = Sometimes()
    other = copy.deepcopy(layer)
    torch.cat([other(rows) for rows in x.chunk(2)]).square().sum().backward()
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    model(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)
    torch.testing.assert_close(layer.base.grad, other.base.grad)


def test_an_input_that_is_a_parameter_may_be_stepped_as_soon_as_its_gradient_is_there() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.weight = nn.Parameter(wide(3, 4)), nn.Parameter(wide(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(self.prompt, self.weight).tanh().mean()

    def stepping(p: Tensor) -> None:
        assert p.grad is not None
        p.detach().sub_(0.1 * p.grad)

    plain = nn.Sequential(Prompted(), nn.Tanh())
    layers = copy.deepcopy(plain)
    for parameter in (*plain.parameters(), *layers.parameters()):
        parameter.register_post_accumulate_grad_hook(stepping)
    x = wide(8, 4)
    plain(x).square().mean().backward()
    SplitPipe(layers, [2], devices=["cpu"], chunks=4, checkpoint="never")(x).square().mean().backward()
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
