"""SplitFunction: a user's function, deferred inside a stage, an ordinary autograd function outside."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitFunction, SplitPipe
from splitpipe.deferral import stash
from tests.helpers.deferring import Call, deferred, drop_in, in_more_ways, trained
from tests.helpers.deferring import double as double
from tests.helpers.twin import Nothing, assert_same, assert_transparent, step, twins


class Affine(SplitFunction):
    """x ** power * scale + shift"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        scale, shift = weights
        ctx.power = options.get("power", 1)
        ctx.save_for_input(scale)
        ctx.save_for_weight(x)
        y = x**ctx.power if scale is None else x**ctx.power * scale
        return y if shift is None else y + shift

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        (scale,) = ctx.saved_for_input
        (x,) = ctx.saved_for_weight
        grad = grad_output * ctx.power * x ** (ctx.power - 1)
        return grad if scale is None else grad * scale

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        scale, shift = ctx.needs_weight_grad
        (x,) = ctx.saved_for_weight
        return (grad_output * x**ctx.power).sum(0) if scale else None, grad_output.sum(0) if shift else None


class Logged(Affine):
    """As Affine; writes down what its backwards were told."""

    log: list[Any] = []

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        Logged.log.append(("input", ctx.needs_input_grad, ctx.needs_weight_grad))
        return Affine.backward_input(ctx, grad_output)

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        Logged.log.append(("weight", ctx.needs_input_grad, ctx.needs_weight_grad))
        return Affine.backward_weight(ctx, grad_output)


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    Logged.log.clear()
    yield
    Logged.log.clear()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def affine(function: type[SplitFunction] = Affine, **options: Any) -> Call:
    return Call(lambda x, w, b: function.apply(x, w, b, **options), w=torch.randn(6), b=torch.randn(6))


@in_more_ways
@pytest.mark.parametrize("power", [1, 3])
def test_a_function_in_a_stage_is_deferred(power: int, way: dict[str, Any]) -> None:
    model = trained(affine(power=power), torch.randn(7, 6), **way)
    assert deferred(model) == {"1.w": "Affine", "1.b": "Affine"}


@in_more_ways
@pytest.mark.parametrize("frozen", ["w", "b"])
def test_a_frozen_weight_gets_no_gradient(frozen: str, way: dict[str, Any]) -> None:
    layer = affine(Logged)
    layer.get_parameter(frozen).requires_grad_(False)
    model = trained(layer, torch.randn(7, 6), steps=1, **way)
    assert set(deferred(model)) == {"1.w", "1.b"} - {f"1.{frozen}"}
    assert {needs for _, _, needs in Logged.log} == {(frozen == "b", frozen == "w")}


@in_more_ways
@pytest.mark.parametrize("function", [
    lambda x, w: Affine.apply(x, w, None), lambda x, w: Affine.apply(x, None, w), lambda x, w: Affine.apply(x, w, w),
], ids=["w, None", "None, w", "w, w"])
def test_weights_may_be_none_or_one_another(function: Any, way: dict[str, Any]) -> None:
    assert deferred(trained(Call(function, w=torch.randn(6)), torch.randn(7, 6), **way)) == {"1.w": "Affine"}


class Double(SplitFunction):
    """A function without weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        return x * 2

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * 2


@in_more_ways
@pytest.mark.parametrize("weights", [(), (None, None)])
def test_a_function_without_weights_is_an_ordinary_one(weights: tuple[None, ...], way: dict[str, Any]) -> None:
    function = Double if not weights else Affine
    layers = nn.Sequential(nn.Linear(6, 6), Call(lambda x: function.apply(x, *weights)))
    trained(layers, torch.randn(7, 6), **way)


@drop_in
def test_an_input_without_grad_has_its_gradient_left_out(way: dict[str, Any]) -> None:
    layers = nn.Sequential(Call(torch.detach), affine(Logged), nn.Tanh())
    model = assert_transparent(layers, torch.randn(7, 6), [2, 1], chunks=3, **way)
    assert set(deferred(model)) == {"1.w", "1.b"}
    assert set(Logged.log) == {("weight", False, (True, True))}


@in_more_ways
@pytest.mark.parametrize("computed", [False, True])
def test_weights_may_be_views_of_parameters_or_computed(
    computed: bool, way: dict[str, Any]
) -> None:
    def turned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return Affine.apply(x, w.t(), b * 2 if computed else b[1:])

    # Square, so that a gradient which isn't transposed back is only wrong in its values.
    layer = Call(turned, w=torch.randn(5, 5), b=torch.randn(5 if computed else 6, 5))
    model = trained(layer, torch.randn(7, 5, 5), **way)
    assert set(deferred(model)) == (set() if computed else {"1.w", "1.b"})


@pytest.mark.parametrize(("checkpoint", "little"), [("never", 0), ("always", 0), ("always", 2**20)])
def test_the_halves_run_apart_in_a_stage(checkpoint: str, little: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes little memory waits even if it would take more during a recomputation."""
    monkeypatch.setattr(stash, "_LITTLE", little)
    options = {"chunks": 3, "checkpoint": checkpoint, "stash_limit": 2**20}
    model = SplitPipe(nn.Sequential(affine(Logged)), [1], devices=["cpu"], **options)
    step(model, torch.randn(7, 6))
    halves = [kind for kind, _, _ in Logged.log]
    at_once = checkpoint == "always" and not little
    assert halves == (["input", "weight"] * 3 if at_once else ["input"] * 3 + ["weight"] * 3)


@pytest.mark.parametrize("power", [1, 3])
def test_gradients_outside_of_a_stage(power: int) -> None:
    def function(*args: Tensor) -> Tensor:
        return Affine.apply(*args, power=power)

    given = leaf(4, 6), leaf(6), leaf(6)
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_outside_of_a_stage_only_required_gradients_are_computed(wanted: tuple[bool, ...]) -> None:
    given = [leaf(4, 6), leaf(6), leaf(6)]
    for x, need in zip(given, wanted):
        x.requires_grad_(need)
    assert torch.autograd.gradcheck(lambda *args: Logged.apply(*args), given)
    assert {kind for kind, _, _ in Logged.log} == ({"input"} if wanted[0] else {"weight"})
    y, some = Affine.apply(*given).sum(), [x for x in given if x.requires_grad]
    assert_same(torch.autograd.grad(y, some, retain_graph=True), torch.autograd.grad(y, some), "again")


def test_a_functions_output_may_be_written_to() -> None:
    class View(Affine):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
            return Affine.forward(ctx, x, *weights).view(x.shape[0], -1)

    layer = Call(lambda x, w, b: View.apply(x, w, b).relu_(), w=torch.randn(6), b=torch.randn(6))
    assert set(deferred(trained(layer, torch.randn(7, 6)))) == {"1.w", "1.b"}


def run(function: type[SplitFunction], inside: bool, *weights: Tensor) -> None:
    """Forward and backward of a function, in a stage or not."""
    if not inside:
        function.apply(leaf(4, 6), *(weights or (leaf(6), leaf(6)))).sum().backward()
        return
    _, model = twins(nn.Sequential(affine(function), nn.Tanh()), chunks=2, checkpoint="never")
    step(model, torch.randn(4, 6))


in_and_out = pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])


#: What a method gives in place of what it should, the error, and its words.
GIVEN: dict[str, tuple[str, Callable[..., Any], type[Exception], str]] = {
    **{f"weight gradients: {what}": (
        "backward_weight", gives, TypeError,
        f"Wrong.backward_weight returned {what}: expected a tuple of 2, a gradient or None for each weight that ")
       for gives, what in [
           (lambda ctx, grad: grad.sum(0), "a Tensor"), (lambda ctx, grad: None, "a NoneType"),
           (lambda ctx, grad: (grad.sum(0),), "a tuple of 1"), (lambda ctx, grad: (grad.sum(0),) * 3, "a tuple of 3"),
           (lambda ctx, grad: [grad.sum(0)] * 2, "a list")]},
    "a weight gradient": ("backward_weight", lambda ctx, grad: (grad.sum(0), 1.0), TypeError,
                          "Wrong.backward_weight returned a float for weight 1: expected a tensor or None"),
    "an input gradient": ("backward_input", lambda ctx, grad: (grad, None), TypeError,
                          "Wrong.backward_input returned a tuple: expected the gradient of x, a tensor or"),
    "no output": ("forward", lambda *_, **__: None, TypeError, "Wrong.forward returned a NoneType: expected one"),
    "two outputs": ("forward", lambda *_, **__: (torch.ones(2), torch.ones(2)), TypeError,
                    "Wrong.forward returned a tuple: expected one tensor."),
    "what is saved for the input alone": (
        "backward_weight", lambda ctx, grad: ctx.saved_for_input, AttributeError,
        "ctx.saved_for_input is freed after backward_input: expected backward_weight to use "
        "ctx.saved_for_weight"),
    "an attribute that was not set": ("backward_input", lambda ctx, grad: ctx.factor, AttributeError,
                                      "ctx has no attribute 'factor': forward() didn't set it"),
}


@in_and_out
@pytest.mark.parametrize("name", GIVEN)
def test_an_invalid_return_value_of_a_method_is_named(name: str, inside: bool) -> None:
    method, gives, error, text = GIVEN[name]
    with pytest.raises(error, match=re.escape(text)) as found:
        run(type("Wrong", (Affine,), {method: staticmethod(gives)}), inside)
    if inside and method == "backward_weight":
        assert "in the weight gradient of 0.w, 0.b" in found.value.__notes__


@pytest.mark.parametrize(("method", "error", "where"), [
    ("backward_weight", ValueError, "in the weight gradient of 0.w, 0.b"),
    ("backward_weight", KeyboardInterrupt, "in the weight gradient of 0.w, 0.b"),
    ("backward_input", KeyboardInterrupt, "in the backward of layer '0' (Call), stage 0 (cpu), microbatch 1 of 2"),
])
def test_whatever_a_backward_raises_says_where_it_was(method: str, error: type[BaseException], where: str) -> None:
    def throw(ctx: Any, grad_output: Tensor) -> Any:
        raise error

    with pytest.raises(error) as found:
        run(type("Raising", (Affine,), {method: staticmethod(throw)}), True)
    assert where in found.value.__notes__


@pytest.mark.parametrize(("args", "text"), [
    ((3.0, torch.ones(6)), "Affine.apply was given a float as x: expected a tensor."),
    ((None,), "Affine.apply was given a NoneType as x: expected a tensor."),
    ((torch.ones(6), torch.ones(6), 3.0), "Affine.apply was given a float as weight 1: expected a tensor or None. Pass "
                                          "anything else by keyword, as an option."),
])
@in_and_out
def test_arguments_that_are_no_tensors(args: tuple[Any, ...], text: str, inside: bool) -> None:
    layer = Call(lambda x: Affine.apply(*args))
    with pytest.raises(TypeError, match="^" + re.escape(text)):
        (twins(nn.Sequential(layer))[1] if inside else layer)(torch.randn(4, 6))


@pytest.mark.parametrize("method", ["forward", "backward_input", "backward_weight"])
@in_and_out
def test_a_missing_method_is_named(method: str, inside: bool) -> None:
    methods = {name: vars(Affine)[name] for name in ("forward", "backward_input", "backward_weight") if name != method}
    with pytest.raises(NotImplementedError, match=f"a SplitFunction needs a static method {method}"):
        run(type("Partial", (SplitFunction,), methods), inside)


@in_more_ways
def test_a_none_for_a_needed_gradient_is_none(way: dict[str, Any]) -> None:
    silent = type("Silent", (Affine,), {"backward_weight": staticmethod(lambda ctx, grad: (None, grad.sum(0)))})
    assert trained(affine(silent), torch.randn(7, 6), **way)[1].w.grad is None


@in_and_out
def test_backwards_run_outside_of_autocast(inside: bool) -> None:
    modes: list[bool] = []

    def asking(backward: Callable[..., Any]) -> Any:
        return staticmethod(lambda ctx, grad: (modes.append(torch.is_autocast_enabled("cpu")), backward(ctx, grad))[1])

    methods = {name: asking(getattr(Affine, name)) for name in ("backward_input", "backward_weight")}
    with torch.autocast("cpu", torch.bfloat16):
        run(type("Asking", (Affine,), methods), inside)
    assert modes and not any(modes)


@in_and_out
def test_autocast_casts_nothing_that_a_function_is_given(inside: bool) -> None:
    class Asking(Affine):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
            types.update(value.dtype for value in (x, *weights) if value is not None)
            return Affine.forward(ctx, x, *weights)

    types: set[torch.dtype] = set()
    layer = affine(Asking).float()
    x = leaf(4, 6).float()
    with torch.autocast("cpu", torch.bfloat16):
        (twins(nn.Sequential(layer))[1] if inside else layer)(x)
    assert types == {torch.float32}


class Times(SplitFunction):
    """Keeps what it needs under a name that the engine might want for itself; saves what it gives, a view or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        (w,) = weights
        assert w is not None
        ctx.options = {"by": options["by"]}
        y = (x * w * options["by"]).exp()
        y = y.view(x.shape) if options["view"] else y
        ctx.save_for_input(w, y)
        ctx.save_for_weight(x, y)
        return y

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        w, y = ctx.saved_for_input
        return grad_output * y * w * ctx.options["by"]

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_for_weight
        return ((grad_output * y * x * ctx.options["by"]).sum(0),)


def second(function: Any, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The first derivatives, and those of the sum of their squares."""
    grads = torch.autograd.grad(function(x, w).sum(), (x, w), create_graph=True)
    return *grads, *torch.autograd.grad(sum((grad**2).sum() for grad in grads), (x, w))


def piped(function: Any, w: Tensor) -> Any:
    """The function with this weight, in a stage."""
    layer = Call(lambda x, _: function(x, w), unused=torch.ones(1))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never", backward="autograd")
    return lambda x, _: model(x)


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_attributes_of_ctx_and_a_saved_output_are_kept(inside: bool, view: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return Times.apply(x, w, by=2.0, view=view)

    w, x = torch.randn(4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    found = second(piped(function, w) if inside else function, x, w)
    torch.testing.assert_close(found, second(lambda x, w: (x * w * 2.0).exp(), x, w))


class Gate(SplitFunction):
    """Gives its weight, and to the input a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Any:
        ctx.save_for_input(weights[0])
        return weights[0]

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        (w,) = ctx.saved_for_input
        return grad_output * w

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (3 * grad_output,)


def test_a_saved_weight_that_is_the_output_is_the_weight() -> None:
    w, x = leaf(6), leaf(6)
    (grad,) = torch.autograd.grad(Gate.apply(x, w).sum(), x, create_graph=True)
    assert torch.equal(*torch.autograd.grad(grad.sum(), w), torch.ones(6))


@in_and_out
def test_an_output_without_gradient_gives_none(inside: bool) -> None:
    layer = Call(lambda x, w, b: x + Nothing.apply(Logged.apply(x, w, b)), w=torch.randn(6), b=torch.randn(6))
    x = leaf(4, 6)
    (twins(nn.Sequential(layer), chunks=2, checkpoint="never")[1] if inside else layer)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 6))
    assert (layer.w.grad, layer.b.grad, Logged.log) == (None, None, [])
