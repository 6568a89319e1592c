"""What counts as a weight: leaves, their transposed views, and what is computed from leaves alone."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from splitpipe import SplitPipe
from splitpipe.deferral.weights import leaves, plain
from tests.helpers.deferring import WAYS, Call, deferred, in_all_ways, left, trained
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors, assert_transparent, step

PARAMETRISED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), (7, 6), "Linear"),
    "weight norm, convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(6, 4, 3)), (7, 6, 5), "Convolution"),
    "weight norm, embedding": (lambda: parametrizations.weight_norm(nn.Embedding(11, 4)), (), "Embedding"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), (7, 6), "MatMul"),
    "orthogonal, of its own base": (
        lambda: parametrizations.orthogonal(nn.Linear(6, 6), use_trivialization=False), (7, 6), "Linear"),
    "orthogonal, householder": (
        lambda: parametrizations.orthogonal(nn.Linear(6, 4), orthogonal_map="householder"), (7, 6), "MatMul"),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 4)).eval(), (7, 6), "Linear"),
}


def given(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) if shape else torch.randint(0, 11, (7, 5))


@in_all_ways
@pytest.mark.parametrize("name", PARAMETRISED)
def test_parametrised_layers_are_their_module(name: str, way: dict[str, Any]) -> None:
    make, shape, function = PARAMETRISED[name]
    model = trained(make(), given(shape), **way)
    found = {name: how for name, how in deferred(model).items() if "original" in name}
    assert found and all(how.startswith(f"{function}, by way of what is computed from it") for how in found.values())


@pytest.mark.parametrize("way", [{"checkpoint": "never"}, {"checkpoint": "always"}], ids=["", "checkpointed"])
def test_a_parametrisation_that_changes_its_buffers_in_forward(way: dict[str, Any]) -> None:
    # One microbatch: the power iteration moves once a forward, in the module and in the pipeline.
    layers = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Tanh())
    model = assert_transparent(layers, torch.randn(7, 6), chunks=1, **way)
    assert deferred(model)["0.parametrizations.weight.original"].startswith("Linear, by way of")


@pytest.mark.parametrize("way", WAYS[:2], ids=["held back", "not held back"])
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


COMPUTED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "scaled": (lambda x, w, b: F.linear(x, w * 2, b), "Linear"),
    "scaled, and its bias": (lambda x, w, b: F.linear(x, w.tanh(), b.exp()), "Linear"),
    "its bias alone": (lambda x, w, b: F.linear(x, w, b * 2), "Linear"),
    "by another": (lambda x, w, b: F.linear(x, w * b, b), "Linear"),
    "a slice": (lambda x, w, b: F.linear(x, w[:4], b[:4]), "Linear"),
    "a slice, transposed": (lambda x, w, b: x @ w[:4].t() + b[:4], "MatMul"),
    "a row of it": (lambda x, w, b: F.linear(x, w.view(1, 6, 6)[0], b), "Linear"),
    "transposed twice": (lambda x, w, b: F.linear(x, w.t().t(), b), "Linear"),
    "the adjoint": (lambda x, w, b: x @ w.mH + b, "MatMul"),
    "on the left": (lambda x, w, b: ((w * 2) @ x[..., None])[..., 0] + b, "LeftMatMul"),
    "expanded": (lambda x, w, b: F.linear(x, b.expand(6, 6) + w, b), "Linear"),
    "masked": (lambda x, w, b: F.linear(x, torch.where(w > 0, w, 0.0), b), "Linear"),
    "modified in place": (lambda x, w, b: F.linear(x, w.t().mul(2).add_(1), b), "Linear"),
}


@in_all_ways
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_deferred(name: str, way: dict[str, Any]) -> None:
    function, by = COMPUTED[name]
    model = trained(Call(function, w=torch.randn(6, 6), b=torch.randn(6)), torch.randn(7, 6), **way)
    assert by in deferred(model)["1.w"]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def far(w: Tensor) -> Tensor:
    for _ in range(20):
        w = w + 1
    return w


REFUSED: dict[str, Callable[..., Tensor]] = {
    "of the input": lambda x, w: F.linear(x, w * x[:1].sum()),
    "of the output": lambda x, w: F.linear(x, w + F.tanh(x[:1].t() * x[:1])),
    "the input itself": lambda x, w: F.linear(x, x[:1].expand(6, 6)) * w[0],
    "far from its parameters": lambda x, w: F.linear(x, far(w)),
    "by a function of the user's": lambda x, w: F.linear(x, Twice.apply(w)),
}


@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("name", REFUSED)
def test_other_weights_are_refused(name: str, chunks: int) -> None:
    layer = Call(lambda x, w: torch.cat([REFUSED[name](row[None], w) for row in x]), w=torch.randn(6, 6))
    model = trained(layer, torch.randn(7, 6), chunks=chunks, checkpoint="never")
    assert deferred(model) == {}


def test_a_weight_that_the_input_of_the_stage_has_a_part_in_is_refused() -> None:
    first = Call(lambda x, w: (x, w * 2), w=torch.randn(6, 6))
    second = Call(lambda p: F.linear(p[0], p[1]))
    model = assert_transparent(nn.Sequential(first, second), torch.randn(7, 6), chunks=1, checkpoint="never")
    assert left(model) == {"0.w": "mul has no rule"}


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


@in_all_ways
@pytest.mark.parametrize("register", [before, after, at_the_node])
def test_hooks_of_a_transposed_view_are_called(way: dict[str, Any], register: Any) -> None:
    """Wherever they come: the gradient of the view passes through its node."""
    seen: list[tuple[int, ...]] = []

    def watched(x: Tensor, w: Tensor) -> Tensor:
        view = w.t()
        return register(view, lambda grad: seen.append(tuple(grad.shape)), lambda: x @ view)

    model = trained(Call(watched, w=torch.randn(4, 6)), torch.randn(7, 6), steps=1, **way)
    assert deferred(model) == {"1.w": "MatMul"}
    assert seen == [(6, 4)] * 4  # Three microbatches, and the plain module.


def test_the_leaves_of_a_computed_weight() -> None:
    a, b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
    found = leaves((a * 2 + b) * a, set())
    assert found is not None
    assert {id(leaf) for leaf in found} == {id(a), id(b)}


def test_a_leaf_that_is_no_parameter_makes_no_weight() -> None:
    assert leaves(nn.Parameter(torch.randn(4)) * torch.randn(4, requires_grad=True), set()) is None


def test_an_input_has_no_leaves() -> None:
    a = nn.Parameter(torch.randn(4))
    x = nn.Parameter(torch.randn(4)) * 2
    assert leaves(a * x, set()) is not None
    assert leaves(a * x, {x.grad_fn}) is None


class Own(Tensor):
    """A class of its own."""


@in_all_ways
def test_what_an_earlier_stage_has_a_part_in_is_no_weight(way: dict[str, Any]) -> None:
    layers = nn.Sequential(nn.LayerNorm(4), Call(lambda x, w: F.linear(x, w * x.mean()), w=torch.randn(4, 4)))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, **way)
    model(torch.randn(4, 4)).sum().backward()
    assert not deferred(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_weight_is_dense_and_of_no_class_of_its_own() -> None:
    x = torch.randn(2, 2)
    assert plain(x) and plain(nn.Parameter(x)) and plain(None)
    assert not plain(x.as_subclass(Own))
    assert not plain(x.to_sparse())
    assert not plain(torch.nested.nested_tensor([x]))
