"""SplitFunction: a user's function, deferred inside a stage, an ordinary autograd function outside."""
from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitFunction
from tests.helpers.deferring import Call, deferred, fused, in_more_ways, trained
from tests.helpers.deferring import double as double
from tests.helpers.faults import throws
from tests.helpers.twin import assert_same, step, twins


class Affine(SplitFunction):
    """x ** power * scale + shift; writes down what its backwards were told, if it is given a log."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        scale, shift = weights
        ctx.power, ctx.log = options.get("power", 1), options.get("log", [])
        ctx.save_for_input(scale)
        ctx.save_for_weight(x)
        y = x**ctx.power if scale is None else x**ctx.power * scale
        return y if shift is None else y + shift

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.log.append(("input", ctx.needs_input_grad, ctx.needs_weight_grad))
        (scale,), (x,) = ctx.saved_for_input, ctx.saved_for_weight
        grad = grad_output * ctx.power * x ** (ctx.power - 1)
        return grad if scale is None else grad * scale

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.log.append(("weight", ctx.needs_input_grad, ctx.needs_weight_grad))
        scale, shift = ctx.needs_weight_grad
        (x,) = ctx.saved_for_weight
        return (grad_output * x**ctx.power).sum(0) if scale else None, grad_output.sum(0) if shift else None


REFUSED = "its rule doesn't take this call"


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def affine(function: type[SplitFunction] = Affine, **options: Any) -> Call:
    return Call(lambda x, w, b: function.apply(x, w, b, **options), w=torch.randn(6), b=torch.randn(6))


@in_more_ways
@pytest.mark.parametrize(("function", "why"), [
    (lambda x, w: Affine.apply(x, w, None, power=3), ""), (lambda x, w: Affine.apply(x, None, w), ""),
    (lambda x, w: Affine.apply(x, w, w), ""),
    (lambda x, w: Affine.apply(x, w.t(), None), f"StandInsBackward: {REFUSED}"),
    (lambda x, w: Affine.apply(x, w, w * 2), f"MulBackward0 has no rule, StandInsBackward: {REFUSED}"),
], ids=["w, None", "None, w", "w, w", "transposed", "computed"])
def test_parameters_and_none_are_weights_that_are_deferred_and_no_others(function, why, way):
    # Square, so that a gradient which isn't transposed back is only wrong in its values.
    model = trained(Call(function, w=torch.randn(5, 5)), torch.randn(7, 5, 5), **way)
    assert (fused(model) if why else deferred(model)) == {"1.w": why or "Affine"}


@in_more_ways
def test_weights_that_are_used_in_another_way_too_are_deferred_in_part(way: dict[str, Any]) -> None:
    layer = Call(lambda x, w, v: (Affine.apply(x, w, v) @ v) * w.sin(), w=torch.randn(5, 5), v=torch.randn(5, 5))
    assert deferred(trained(layer, torch.randn(7, 5, 5), **way)) == {
        "1.w": "Affine; by autograd: SinBackward0 has no rule", "1.v": f"Affine; by autograd: MmBackward0: {REFUSED}"}


@in_more_ways
@pytest.mark.parametrize("frozen", ["", "w", "b"])
def test_a_frozen_weight_gets_no_gradient(frozen: str, way: dict[str, Any]) -> None:
    log: list[Any] = []
    layer = affine(log=log, power=3)
    if frozen:
        layer.get_parameter(frozen).requires_grad_(False)
    model = trained(layer, torch.randn(7, 6), steps=1, **way)
    assert deferred(model) == {f"1.{name}": "Affine" for name in "wb" if name != frozen}
    assert {needs for _, _, needs in log} == {(frozen != "w", frozen != "b")}


@in_more_ways
def test_a_none_for_a_needed_gradient_is_none_and_attributes_reach_backward_weight(way: dict[str, Any]) -> None:
    def of_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.own = 3
        return Affine.backward_input(ctx, grad_output)

    def of_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        assert getattr(ctx, "own", 3) == 3
        return None, grad_output.sum(0)

    silent = type("Silent", (Affine,), {INPUT: staticmethod(of_input), WEIGHT: staticmethod(of_weight)})
    assert trained(affine(silent), torch.randn(7, 6), **way)[1].w.grad is None


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False),
                                    (False, False, True)])
def test_gradients_outside_of_a_stage(wanted: tuple[bool, ...], power: int) -> None:
    log: list[Any] = []
    given = [leaf(4, 6), leaf(6), leaf(6)]
    for x, need in zip(given, wanted):
        x.requires_grad_(need)

    def function(*args: Tensor) -> Tensor:
        return Affine.apply(*args, power=power, log=log)

    assert torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)
    log.clear()
    y, some = function(*given).sum(), [x for x in given if x.requires_grad]
    assert_same(torch.autograd.grad(y, some, retain_graph=True), torch.autograd.grad(y, some), "again")
    assert ("input" in {kind for kind, _, _ in log}) is wanted[0]
    assert ("weight" in {kind for kind, _, _ in log}) is any(wanted[1:])


def run(function: type[SplitFunction], inside: bool) -> None:
    """Forward and backward of a function, in a stage or not."""
    if not inside:
        function.apply(leaf(4, 6), leaf(6), leaf(6)).sum().backward()
        return
    _, model = twins(nn.Sequential(affine(function), nn.Tanh()), chunks=2, checkpoint="never")
    step(model, torch.randn(4, 6))


in_and_out = pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
WEIGHT, INPUT = "backward_weight", "backward_input"


#: A method, what it does in place of what it should, the error, and its words.
WRONG: list[tuple[str, Callable[..., Any], type[BaseException], str]] = [
    *[(WEIGHT, gives, TypeError, f"Wrong.backward_weight returned {what}: expected a tuple of 2, a gradient or None "
       "for each weight that ") for gives, what in [
           (lambda ctx, grad: grad.sum(0), "a Tensor"), (lambda ctx, grad: None, "a NoneType"),
           (lambda ctx, grad: (grad.sum(0),) * 3, "a tuple of 3"), (lambda ctx, grad: [grad.sum(0)] * 2, "a list")]],
    (INPUT, lambda ctx, grad: (grad, None), RuntimeError, "expected Variable or None (got tuple)"),
    (WEIGHT, lambda ctx, grad: ctx.saved_for_input, AttributeError, "saved_for_input"),
    (INPUT, lambda ctx, grad: ctx.factor, AttributeError, "'Context' object has no attribute 'factor'"),
    *[(method, throws(error("no")), error, "no") for method, error in [
        (WEIGHT, ValueError), (WEIGHT, KeyboardInterrupt), (INPUT, KeyboardInterrupt)]],
]


@in_and_out
@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]}, {case[2].__name__}")
def test_whatever_a_backward_does_wrong_says_what_and_where(case: Any, inside: bool) -> None:
    method, does, error, text = case
    with pytest.raises(error, match=re.escape(text)) as found:
        run(type("Wrong", (Affine,), {method: staticmethod(does)}), inside)
    where = {WEIGHT: "in the weight gradient of 0.w, 0.b", INPUT: "in the backward of stage 0 (cpu), microbatch 1"}
    assert not inside or where[method] in found.value.__notes__


@pytest.mark.parametrize(("args", "text"), [
    ((3.0, torch.ones(6)), "Affine.apply was given a float as x: expected a tensor."),
    ((None,), "Affine.apply was given a NoneType as x: expected a tensor."),
    ((torch.ones(6), torch.ones(6), 3.0), "Affine.apply was given a float as weight 1: expected a tensor or None."),
])
def test_arguments_that_are_no_tensors(args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match="^" + re.escape(text)):
        Affine.apply(*args)


@pytest.mark.parametrize("method", ["forward", INPUT, WEIGHT])
@in_and_out
def test_a_missing_method_is_named(method: str, inside: bool) -> None:
    methods = {name: vars(Affine)[name] for name in ("forward", INPUT, WEIGHT) if name != method}
    with pytest.raises(NotImplementedError, match=f"a SplitFunction needs a static method {method}"):
        run(type("Partial", (SplitFunction,), methods), inside)


@in_and_out
def test_backwards_run_outside_of_autocast(inside: bool) -> None:
    modes: list[bool] = []

    def asking(backward: Callable[..., Any]) -> Any:
        return staticmethod(lambda ctx, grad: (modes.append(torch.is_autocast_enabled("cpu")), backward(ctx, grad))[1])

    with torch.autocast("cpu", torch.bfloat16):
        run(type("Asking", (Affine,), {name: asking(getattr(Affine, name)) for name in (INPUT, WEIGHT)}), inside)
    assert modes and not any(modes)


def test_what_is_saved_goes_with_the_backward_though_the_loss_lives_on() -> None:
    x = leaf(2, 6) * 2
    saved, loss = weakref.ref(x), Affine.apply(x, leaf(6), leaf(6)).sum()
    del x
    loss.backward()
    assert saved() is None and loss.isfinite()
