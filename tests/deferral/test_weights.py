"""What counts as a weight: parameters, and views of one; what is computed is autograd's, and right."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from splitpipe import SplitPipe
from tests.helpers.deferring import WAYS, Call, deferred, drop_in, in_more_ways, left, trained, tried
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors, step

PARAMETRISED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), (7, 6)),
    "weight norm, convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(6, 4, 3)), (7, 6, 5)),
    "weight norm, embedding": (lambda: parametrizations.weight_norm(nn.Embedding(11, 4)), ()),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), (7, 6)),
    "orthogonal, of its own base": (
        lambda: parametrizations.orthogonal(nn.Linear(6, 6), use_trivialization=False), (7, 6)),
    "orthogonal, householder": (
        lambda: parametrizations.orthogonal(nn.Linear(6, 4), orthogonal_map="householder"), (7, 6)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 4)).eval(), (7, 6)),
}


def given(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) if shape else torch.randint(0, 11, (7, 5))


@tried(PARAMETRISED)
def test_parametrised_layers_are_their_module(name: str, way: dict[str, Any]) -> None:
    make, shape = PARAMETRISED[name]
    trained(make(), given(shape), **way)


@pytest.mark.parametrize("way", [*WAYS.values()][:2], ids=[*WAYS][:2])
def test_a_cached_parametrisation_serves_all_microbatches(way: dict[str, Any]) -> None:
    layer = parametrizations.weight_norm(nn.Linear(6, 4))
    plain_layer = parametrizations.weight_norm(nn.Linear(6, 4))  # A copy would share the cache.
    plain_layer.load_state_dict(layer.state_dict())
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=3, **way)
    x = torch.randn(7, 6)
    with parametrize.cached():
        step(model, x)
    step(plain_layer, x)
    assert_same_tensors(layer, plain_layer)


VIEWS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a slice": (lambda x, w, b: F.linear(x, w[:4], b[:4]), "Linear"),
    "a slice, transposed": (lambda x, w, b: x @ w[:4].t() + b[:4], "Linear"),
    "a row of it": (lambda x, w, b: F.linear(x, w.view(1, 6, 6)[0], b), "Linear"),
    "transposed twice": (lambda x, w, b: F.linear(x, w.t().t(), b), "Linear"),
    "the adjoint": (lambda x, w, b: x @ w.mH + b, "MatMul"),
    "parts of it, and all": (
        lambda x, w, b: sum(F.linear(x, part) for part in w.chunk(3)).repeat(1, 3) + F.linear(x, w, b), "Linear"),
    "expanded": (lambda x, w, b: F.linear(x, w[:1].expand(6, 6), b), "Linear"),
}


def both(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    view = w.t()
    return (x @ view) * view[0].exp() + b


@tried(VIEWS)
def test_a_view_of_a_parameter_is_deferred(name: str, way: dict[str, Any]) -> None:
    function, by = VIEWS[name]
    model = trained(Call(function, w=torch.randn(6, 6), b=torch.randn(6)), torch.randn(7, 6), **way)
    assert deferred(model)["1.w"].startswith(by)


@in_more_ways
def test_a_view_that_an_unruled_node_uses_too_is_autograds(way: dict[str, Any]) -> None:
    model = trained(Call(both, w=torch.randn(6, 6), b=torch.randn(6)), torch.randn(7, 6), **way)
    assert left(model)["1.w"] == "exp has no rule"


COMPUTED: dict[str, Callable[..., Tensor]] = {
    "scaled": lambda x, w: F.linear(x, w * 2),
    "its bias": lambda x, w: F.linear(x, w, w.sum(1)),
    "on the left": lambda x, w: ((w * 2) @ x[..., None])[..., 0],
    "modified in place": lambda x, w: F.linear(x, w.t().mul(2).add_(1)),
    "of the input": lambda x, w: F.linear(x, w * x[:1].sum()),
    "of the output": lambda x, w: F.linear(x, w + F.tanh(x[:1].t() * x[:1])),
    "the input itself": lambda x, w: F.linear(x, x[:1].expand(6, 6)) * w[0],
    "by a function of the user's": lambda x, w: F.linear(x, Twice.apply(w)),
    "a view by a function of the user's": lambda x, w: F.linear(x, View.apply(w)),
    "a view of such a view": lambda x, w: F.linear(x, View.apply(w).t()),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class View(Twice):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)


@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("name", COMPUTED)
def test_other_weights_are_autograds(name: str, chunks: int) -> None:
    layer = Call(lambda x, w: torch.cat([COMPUTED[name](row[None], w) for row in x]), w=torch.randn(6, 6))
    model = trained(layer, torch.randn(7, 6), chunks=chunks, checkpoint="never")
    assert deferred(model) == {}


def before(view: Tensor, hook: Callable[[Tensor], None], call: Callable[[], Tensor]) -> Tensor:
    view.register_hook(hook)
    return call()


def after(view: Tensor, hook: Callable[[Tensor], None], call: Callable[[], Tensor]) -> Tensor:
    y = call()
    view.register_hook(hook)
    return y


def at_the_node(view: Tensor, hook: Callable[[Tensor], None], call: Callable[[], Tensor]) -> Tensor:
    view.grad_fn.register_prehook(lambda grads: hook(grads[0]))
    return call()


@in_more_ways
@pytest.mark.parametrize("register", [before, after, at_the_node])
def test_hooks_of_a_transposed_view_are_called(way: dict[str, Any], register: Any) -> None:
    """Wherever they come: the gradient of the view passes through its node, once for all microbatches."""
    seen: list[Tensor] = []

    def watched(x: Tensor, w: Tensor) -> Tensor:
        view = w.t()
        return register(view, lambda grad: seen.append(grad.clone()), lambda: x @ view)

    model = trained(Call(watched, w=torch.randn(4, 6)), torch.randn(7, 6), steps=1, **way)
    assert deferred(model) == {"1.w": "Linear"}
    found, expected = seen  # The pipeline's, and the plain module's.
    torch.testing.assert_close(found, expected)


class OwnParameter(nn.Parameter):
    """A parameter of a class of its own."""


def test_a_parameter_of_another_class_is_autograds() -> None:
    layer = Call(lambda x, w: F.linear(x, w), w=torch.randn(6, 6))
    layer.w = OwnParameter(torch.randn(6, 6))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=3)
    x = torch.randn(7, 6)
    step(model, x)
    assert left(model) == {"0.w": "mm: its input or its weight has a custom class"}
    torch.testing.assert_close(model[0].w.grad, *_gradient(x, layer.w))


def _gradient(x: Tensor, w: Tensor) -> tuple[Tensor]:
    other = w.detach().as_subclass(Tensor).clone().requires_grad_()
    step(lambda x: F.linear(x, other), x)
    assert other.grad is not None
    return (other.grad,)


@drop_in
def test_a_weight_that_is_used_often_is_flushed_once(way: dict[str, Any]) -> None:
    layer = Call(lambda x, w: F.linear(F.linear(x, w), w) + F.linear(x, w), w=torch.randn(6, 6))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=3, **way)
    with torch.autograd.profiler.profile() as profile:
        step(model, torch.randn(7, 6))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["FlushBackward"] == 1
