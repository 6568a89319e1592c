"""Gradients of what is no parameter of a layer: input, target, what closures hold, what loss functions have."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.graph import reserve
from splitpipe.training import capture
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mean, mlp
from tests.helpers.twin import Nothing, assert_same
from tests.promise.layers import Apply

WAYS = pytest.mark.parametrize(
    "way",
    [("1f1b", {}), ("zb-v", {}), ("zb-v", {"checkpoint": "always"}), ("zb-h1", {"backward": "autograd"})],
    ids=["1f1b", "zb-v", "zb-v, checkpointed", "zb-h1, autograd"],
)
Way = tuple[str, dict[str, Any]]


def wrapped(layers: list[nn.Module], way: Way, loss_fn: Any = mean, chunks: int = 3) -> SplitPipe:
    """Four layers, one a stage on one or two rows."""
    name, options = way
    devices = 2 if name == "zb-v" else 4
    return SplitPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * devices, chunks=chunks, schedule=name,
                     loss_fn=loss_fn, **options)


def gradients(loss: Tensor, *leaves: Tensor) -> list[Any]:
    """What backward leaves in .grad; the fields are empty before and afterwards."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def assert_equal_for(layers: list[nn.Module], way: Way, *leaves: Tensor, x: Tensor | None = None) -> None:
    """The same module, run plainly and by a schedule, gives the same gradients of leaves that both share."""
    x = torch.randn(7, 4) if x is None else x
    plain = nn.Sequential(*layers)
    every = [*leaves, *plain.parameters()]
    expected = gradients(mean(plain(x), 0.25), *every)
    model = wrapped(layers, way)
    loss = model(x, target=0.25)
    assert all(leaf.grad is None for leaf in every)
    assert_same(gradients(loss, *every), expected, "gradients")
    assert_same(gradients(model(x, target=0.25) * 2, *every), [g if g is None else g * 2 for g in expected], "again")


def assert_equal_computed(
    layers: list[nn.Module], way: Way, computed: list[Tensor], compute: Callable[[], Tensor], *leaves: Tensor
) -> None:
    """The same of layers that use the last tensor computed outside, which is made again for each run."""
    plain, x = nn.Sequential(*layers), torch.randn(7, 4)
    model = wrapped(layers, way)
    found = []
    for run in (lambda: mean(plain(x), 0.25), lambda: model(x, target=0.25)):
        computed.append(compute())
        found.append(gradients(run(), *leaves, *plain.parameters()))
    assert_same(found[1], found[0], "gradients")


# Input and target


@WAYS
def test_an_input_that_is_a_leaf(way: Way) -> None:
    x = torch.randn(7, 4, requires_grad=True)
    assert_equal_for(list(mlp(4)), way, x, x=x)


@WAYS
def test_an_input_that_was_computed(way: Way) -> None:
    leaf, layer = torch.randn(7, 4, requires_grad=True), nn.Linear(4, 4)
    layers = list(mlp(4))
    plain, model = nn.Sequential(*copy.deepcopy(layers)), wrapped(layers, way)
    expected = gradients(mean(plain(layer(leaf)), 0.25), leaf, *layer.parameters())
    assert_same(gradients(model(layer(leaf), target=0.25), leaf, *layer.parameters()), expected, "gradients")


class Join(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        a, (b, scale), n = given["a"], given["b"], given["n"]
        y: Tensor = a.sin() * b + scale * a + n
        return y


@WAYS
def test_several_tensors_one_without_dimensions_and_one_without_gradient(way: Way) -> None:
    a, b = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4)
    scale, unused = torch.tensor(1.5, requires_grad=True), torch.randn(7, 2, requires_grad=True)
    given = {"a": a, "b": (b, scale), "n": 3, "unused": unused, "none": None}
    layers = [Join(), *mlp(3)]
    plain = nn.Sequential(*copy.deepcopy(layers))
    expected = gradients(mean(plain(given), 0.25), a, scale, unused)
    found = gradients(wrapped(layers, way)(given, target=0.25), a, scale, unused)
    assert_same(found, expected, "gradients")
    assert found[2] is None


@WAYS
def test_a_complex_input(way: Way) -> None:
    x = torch.randn(7, 4, dtype=torch.complex128, requires_grad=True)
    layers = [nn.Linear(4, 4, dtype=torch.complex128), Apply(lambda y: y * y.conj()), Apply(lambda y: y.real),
              nn.Linear(4, 4)]
    assert_equal_for(layers, way, x, x=x)


@WAYS
def test_a_target_that_requires_grad(way: Way) -> None:
    layers, x = list(mlp(4)), torch.randn(7, 4)
    target, weight = torch.randn(7, 4, requires_grad=True), torch.tensor(2.0, requires_grad=True)

    def loss_fn(output: Tensor, given: Any) -> Tensor:
        return (given[1] * (output - given[0]["y"].tanh())).square().mean()

    plain = nn.Sequential(*copy.deepcopy(layers))
    given = ({"y": target}, weight)
    expected = gradients(loss_fn(plain(x), given), target, weight)
    found = gradients(wrapped(layers, way, loss_fn)(x, target=given), target, weight)
    assert_same(found, expected, "gradients")


@WAYS
def test_input_and_target_may_be_one_tensor(way: Way) -> None:
    layers, x = list(mlp(4)), torch.randn(7, 4, requires_grad=True)
    plain = nn.Sequential(*copy.deepcopy(layers))
    expected = gradients(F.mse_loss(plain(x), x), x)
    assert_same(gradients(wrapped(layers, way, F.mse_loss)(x, target=x), x), expected, "gradient")


def test_an_input_that_no_layer_uses_has_no_gradient() -> None:
    x = torch.randn(7, 4, requires_grad=True)
    layers = [Apply(torch.zeros_like), *mlp(3)]
    assert_equal_for(layers, ("zb-v", {}), x, x=x)
    assert x.grad is None


@WAYS
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_input_that_some_microbatch_does_not_use_has_zeros_there(way: Way, number: int) -> None:
    layers = [Apply(lambda x: (x.detach() if x[0, 0] > 100 else x) * 2), *mlp(3)]
    x = torch.randn(6, 4)
    x[2 * number, 0] = 200.0
    x.requires_grad_()
    losses = [mean(nn.Sequential(*layers)(part), 0.25) / 3 for part in x.chunk(3)]
    expected = gradients(torch.stack(losses).sum(), x)
    assert_same(gradients(wrapped(layers, way)(x, target=0.25), x), expected, "gradient")


# Closures


def test_the_graph_is_kept_only_where_another_microbatch_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    backward = capture._engine_run_backward

    def run(roots: Any, grads: Any, keep: bool, *others: Any, **options: Any) -> Any:
        kept.append(keep)
        return backward(roots, grads, keep, *others, **options)

    monkeypatch.setattr(capture, "_engine_run_backward", run)
    x = torch.randn(7, 4, requires_grad=True)
    assert_equal_for(list(mlp(4)), ("zb-v", {}), x, x=x)
    assert kept and not any(kept)
    leaf = torch.randn(4, requires_grad=True)
    assert_equal_for([*mlp(3), Apply(lambda x: x * leaf)], ("zb-v", {}), leaf)
    assert any(kept)


@WAYS
def test_a_tensor_that_was_computed_outside_from_a_parameter_of_the_stage(way: Way) -> None:
    reserve(10_000)  # No worker will get so far.
    layer = nn.Linear(4, 4)
    computed: list[Tensor] = []
    layers = [nn.Linear(4, 4), nn.Sequential(layer, Apply(lambda x: x * computed[-1])), nn.Linear(4, 4), nn.Tanh()]
    assert_equal_computed(layers, way, computed, lambda: layer.bias.exp() * layer.bias)


@WAYS
def test_weights_of_a_functional_call_that_are_no_leaves(way: Way) -> None:
    """As meta-learning has them: the gradient is asked for of what stands in the parameters' place."""
    plain, x = mlp(4), torch.randn(7, 4)
    model = wrapped(list(plain), (way[0], {**way[1], "checkpoint": "never"}))
    found = []
    for run in (lambda weights: mean(functional_call(plain, weights, (x,)), 0.25),
                lambda weights: functional_call(model, weights, (x,), {"target": 0.25})):
        weights = {name: parameter * 2 for name, parameter in plain.named_parameters()}
        found.append(list(torch.autograd.grad(run(weights), [*weights.values(), *plain.parameters()])))
    assert_same(found[1], found[0], "gradients")


@WAYS
def test_a_leaf_that_a_layer_holds_by_a_closure(way: Way) -> None:
    leaf = torch.randn(4, requires_grad=True)
    layers = [nn.Linear(4, 4), Apply(lambda x: x * leaf), nn.Linear(4, 4), Apply(lambda x: x + leaf)]
    assert_equal_for(layers, way, leaf)


@WAYS
def test_a_parameter_that_a_layer_holds_by_a_closure(way: Way) -> None:
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    layers = [nn.Linear(4, 4), Apply(lambda x: F.linear(x, weight, bias)), nn.Tanh(),
              Apply(lambda x: F.linear(x, weight.t()))]
    assert_equal_for(layers, way, weight, bias)


@WAYS
def test_a_parameter_of_a_closure_whose_use_gets_no_gradient_has_none(way: Way) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    layers = [nn.Linear(4, 4), Apply(lambda x: x + Nothing.apply(F.linear(x, weight))), nn.Tanh(), nn.Linear(4, 4)]
    assert_equal_for(layers, way, weight)


@WAYS
def test_a_tensor_that_a_closure_computed_outside(way: Way) -> None:
    leaf = torch.randn(4, requires_grad=True)
    computed: list[Tensor] = []
    layers = [nn.Linear(4, 4), Apply(lambda x: x * computed[-1]), nn.Linear(4, 4), Apply(lambda x: x + computed[-1])]
    assert_equal_computed(layers, way, computed, lambda: leaf.exp() * leaf, leaf)


@WAYS
def test_a_weight_that_a_closure_computed_outside(way: Way) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    computed: list[Tensor] = []
    layers = [nn.Linear(4, 4), Apply(lambda x: F.linear(x, computed[-1])), nn.Linear(4, 4), nn.Tanh()]
    assert_equal_computed(layers, way, computed, lambda: leaf.exp() * leaf, leaf)


@WAYS
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_leaf_that_some_microbatch_uses_instead_of_a_parameter(way: Way, number: int) -> None:
    """Its graph has as many nodes as those of the others."""
    outside = torch.randn(4, requires_grad=True)

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * (outside if x[0, 0] > 100 else self.weight)

    layers = [Apply(lambda x: x * 1), Either(), nn.Linear(4, 4), nn.Tanh()]
    model = wrapped(layers, way)
    x = torch.randn(6, 4)
    x[2 * number, 0] = 200.0
    weight = layers[1].weight
    losses = [mean(nn.Sequential(*layers)(part), 0.25) / 3 for part in x.chunk(3)]
    expected = gradients(torch.stack(losses).sum(), outside, weight)
    loss = model(x, target=0.25)
    assert outside.grad is None and weight.grad is None
    assert_same(gradients(loss, outside, weight), expected, "gradients")


@WAYS
def test_hooks_of_a_leaf_that_a_closure_holds_fire_once(way: Way) -> None:
    fired: list[Tensor] = []
    leaf = torch.randn(4, requires_grad=True)
    leaf.register_hook(fired.append)
    model = wrapped([nn.Linear(4, 4), Apply(lambda x: x * leaf), nn.Linear(4, 4), nn.Tanh()], way)
    loss = model(torch.randn(7, 4), target=0.25)
    assert not fired and leaf.grad is None
    loss.backward()
    assert_same(fired, [leaf.grad], "what the hook saw")


@WAYS
def test_parameters_of_a_loss_function(way: Way) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.rand(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.scale * F.mse_loss(self.head(output), target)

    layers, loss_fn, x, y = list(mlp(4)), Loss(), torch.randn(7, 4), torch.randn(7, 2)
    plain = nn.Sequential(*copy.deepcopy(layers))
    expected = gradients(loss_fn(plain(x), y), *loss_fn.parameters())
    model = wrapped(layers, way, loss_fn)
    assert not any("head" in key for key in model.state_dict()) and "scale" not in dict(model.named_parameters())
    fired: list[str] = []
    handles = [parameter.register_hook(lambda _: fired.append("hook")) for parameter in loss_fn.parameters()]
    found = gradients(model(x, target=y), *loss_fn.parameters())
    assert_same(found, expected, "gradients")
    assert len(fired) == len(handles)
    assert loss_fn.scale is dict(loss_fn.named_parameters())["scale"]


@WAYS
def test_parameters_that_a_loss_function_holds_by_a_closure(way: Way) -> None:
    layers, scale, x = list(mlp(4)), nn.Parameter(torch.rand(())), torch.randn(7, 4)

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        return scale * mean(output, target)

    plain = nn.Sequential(*copy.deepcopy(layers))
    expected = gradients(loss_fn(plain(x), 0.25), scale)
    assert_same(gradients(wrapped(layers, way, loss_fn)(x, target=0.25), scale), expected, "gradient")
