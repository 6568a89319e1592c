"""Gradients of tensors that are not parameters of a layer: input, target, closures, parameters of the loss function."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.graph import reserve
from tests.helpers.deferring import double as double
from tests.helpers.modules import module_of
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


def assert_equal_for(
    layers: list[nn.Module], way: Way, *leaves: Tensor, given: Any = None, target: Any = 0.25, loss_fn: Any = mean,
    before: Callable[[], object] = lambda: None, parts: int = 1,
) -> None:
    """The same module, run plainly and by a schedule, gives the same gradients of leaves that both share.

    Args:
        layers: of the module.
        way: how they are run.
        leaves: what gradients are of, besides the layers' parameters.
        given: the input.
        target: of the loss.
        loss_fn: the loss.
        before: is called before each run.
        parts: of how many microbatches the module is run one after the other.
    """
    x = torch.randn(7, 4) if given is None else given
    plain, model = nn.Sequential(*layers), wrapped(layers, way, loss_fn)
    every = [*leaves, *plain.parameters()]

    def loss_of(module: nn.Module) -> Tensor:
        before()
        if module is model:
            return model(x, target=target)
        if parts == 1:
            return loss_fn(plain(x), target)
        return torch.stack([loss_fn(plain(part), target) for part in x.chunk(parts)]).mean()

    expected = gradients(loss_of(plain), *every)
    loss = loss_of(model)
    assert all(leaf.grad is None for leaf in every)
    assert_same(gradients(loss, *every), expected, "gradients")
    assert_same(gradients(loss_of(model) * 2, *every), [g if g is None else g * 2 for g in expected], "again")


def leaf(*shape: int, dtype: Any = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# Input and target


@WAYS
def test_gradients_of_the_target(way: Way) -> None:
    target, weight, x = leaf(7, 4), leaf(), leaf(7, 4)

    def loss_fn(output: Tensor, given: Any) -> Tensor:
        return (given[1] * (output - given[0]["y"].tanh())).square().mean()

    assert_equal_for(list(mlp(4)), way, target, weight, target=({"y": target}, weight), loss_fn=loss_fn)
    assert_equal_for(list(mlp(4)), way, x, given=x, target=x, loss_fn=F.mse_loss)  # One tensor is both.


@WAYS
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_input_that_some_microbatch_does_not_use(way: Way, number: int) -> None:
    x = torch.randn(6, 4)
    x[2 * number, 0] = 200.0
    layers = [Apply(lambda x: (x.detach() if x[0, 0] > 100 else x) * 2), *mlp(3)]
    assert_equal_for(layers, way, x.requires_grad_(), given=x, parts=3)


# Closures


def by_leaf(held: Tensor) -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: x * held), nn.Linear(4, 4), Apply(lambda x: x + held)]


def by_weight(held: Tensor) -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: F.linear(x, held)), nn.Tanh(), Apply(lambda x: F.linear(x, held.t()))]


def without_gradient(held: Tensor) -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: x + Nothing.apply(F.linear(x, held))), nn.Tanh(), nn.Linear(4, 4)]


@WAYS
@pytest.mark.parametrize("make", [by_leaf, by_weight, without_gradient])
@pytest.mark.parametrize("parameter", [False, True])
def test_a_leaf_that_layers_hold_by_closures(make: Callable[[Tensor], list[nn.Module]], parameter: bool,
                                             way: Way) -> None:
    held = leaf(4) if make is by_leaf else leaf(4, 4)
    held = nn.Parameter(held.detach()) if parameter else held
    assert_equal_for(make(held), way, held)


@WAYS
@pytest.mark.parametrize("kind", ["a scale", "a weight", "of the stage's own parameter"])
def test_a_tensor_that_was_computed_outside(kind: str, way: Way) -> None:
    reserve(10_000)  # No worker will get so far.
    held = leaf(4, 4) if kind == "a weight" else leaf(4)
    inner, computed = nn.Linear(4, 4), list[Tensor]()
    use: Callable[[Tensor], Tensor] = {"a weight": lambda x: F.linear(x, computed[-1])}.get(
        kind, lambda x: x * computed[-1])
    if kind == "of the stage's own parameter":
        layers = [nn.Linear(4, 4), nn.Sequential(inner, Apply(use)), nn.Linear(4, 4), nn.Tanh()]
        held = inner.bias
    else:
        layers = [nn.Linear(4, 4), Apply(use), nn.Linear(4, 4), Apply(use)]
    assert_equal_for(layers, way, held, before=lambda: computed.append(held.exp() * held))


def twice(self: Any, x: Tensor) -> Tensor:
    """Uses its weight in several ways."""
    return F.linear((x @ self.weight).tanh(), self.weight) * self.weight.sum()


@WAYS
def test_weights_of_a_functional_call(way: Way) -> None:
    """As meta-learning has them: the gradient is asked for of what stands in the parameters' place."""
    layer, x = module_of(twice, weight=nn.Parameter(torch.randn(4, 4))), torch.randn(7, 4)
    plain = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 4))
    model = wrapped(list(plain), (way[0], {**way[1], "checkpoint": "never"}))
    found = []
    for run in (lambda weights: mean(functional_call(plain, weights, (x,)), 0.25),
                lambda weights: functional_call(model, weights, (x,), {"target": 0.25})):
        weights = {name: parameter * 2 for name, parameter in plain.named_parameters()}
        found.append(list(torch.autograd.grad(run(weights), [*weights.values(), *plain.parameters()])))
        assert all(parameter.grad is None for parameter in plain.parameters())
    assert_same(found[1], found[0], "gradients")


@WAYS
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_leaf_that_some_microbatch_uses_instead_of_a_parameter(way: Way, number: int) -> None:
    """Its graph has as many nodes as those of the others."""
    outside = leaf(4)

    def either(self: Any, x: Tensor) -> Tensor:
        return x * (outside if x[0, 0] > 100 else self.weight)

    x = torch.randn(6, 4)
    x[2 * number, 0] = 200.0
    layer = module_of(either, weight=nn.Parameter(torch.randn(4)))
    layers = [Apply(lambda x: x * 1), layer, nn.Linear(4, 4), nn.Tanh()]
    if "checkpoint" not in way[1] or not number:
        assert_equal_for(layers, way, outside, given=x, parts=3)
        return
    model, every = wrapped(layers, way), [outside, *nn.Sequential(*layers).parameters()]
    with pytest.raises(RuntimeError, match="isn't one of its parameters.*Repeat the step"):
        model(x, target=0.25)
    losses = [mean(nn.Sequential(*layers)(part), 0.25) for part in x.chunk(3)]
    assert_same(gradients(model(x, target=0.25), *every), gradients(torch.stack(losses).mean(), *every), "gradients")


@WAYS
def test_parameters_of_a_loss_function(way: Way) -> None:
    def loss(self: Any, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(self.head(output), target)  # type: ignore[no-any-return]

    loss_fn = module_of(loss, head=nn.Linear(4, 2), scale=nn.Parameter(torch.rand(())))
    layers, target, fired = list(mlp(4)), torch.randn(7, 2), list[str]()
    assert_equal_for(layers, way, *loss_fn.parameters(), target=target, loss_fn=loss_fn)
    model = wrapped(layers, way, loss_fn)
    assert not any("head" in key for key in model.state_dict()) and "scale" not in dict(model.named_parameters())
    handles = [parameter.register_hook(lambda _: fired.append("hook")) for parameter in loss_fn.parameters()]
    model(torch.randn(7, 4), target=target).backward()
    assert len(fired) == len(handles) and loss_fn.scale is dict(loss_fn.named_parameters())["scale"]
