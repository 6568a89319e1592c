"""Gradients of leaves with a schedule: input, target, closures, parameters of the loss function, odd parameters."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import mean, mlp
from tests.helpers.twin import Nothing, assert_same, assert_same_tensors
from tests.promise.layers import Apply

Way = tuple[str, dict[str, Any]]
WAYS: dict[str, Way] = {
    "1f1b": ("1f1b", {}), "zb-v": ("zb-v", {}), "zb-v, checkpointed": ("zb-v", {"checkpoint": "always"}),
    "zb-h1, autograd": ("zb-h1", {"backward": "autograd"}),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def wrapped(layers: list[nn.Module], way: Way, loss_fn: Any = mean) -> SplitPipe:
    """Four layers, one a stage on one or two rows."""
    name, options = way
    devices = 2 if name == "zb-v" else 4
    return SplitPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * devices, chunks=3, schedule=name,
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
) -> None:
    """The same module, run plainly and by a schedule, gives the same gradients of leaves that both share."""
    x = torch.randn(7, 4) if given is None else given
    plain, model = nn.Sequential(*layers), wrapped(layers, way, loss_fn)
    every = [*leaves, *plain.parameters()]
    expected = gradients(loss_fn(plain(x), target), *every)
    for factor in (1, 2):
        loss = model(x, target=target)
        assert all(leaf.grad is None for leaf in every)
        assert_same(gradients(loss * factor, *every), [g if g is None else g * factor for g in expected], "gradients")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@ways
def test_gradients_of_the_target(way: Way) -> None:
    target, weight, x = leaf(7, 4), leaf(), leaf(7, 4)

    def loss_fn(output: Tensor, given: Any) -> Tensor:
        return (given[1] * (output - given[0]["y"].tanh())).square().mean()

    assert_equal_for(list(mlp(4)), way, target, weight, target=({"y": target}, weight), loss_fn=loss_fn)
    assert_equal_for(list(mlp(4)), way, x, given=x, target=x, loss_fn=F.mse_loss)  # One tensor is both.


def by_leaf(held: Tensor) -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: x * held), nn.Linear(4, 4), Apply(lambda x: x + held)]


def without_gradient(held: Tensor) -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: x + Nothing.apply(F.linear(x, held))), nn.Tanh(), nn.Linear(4, 4)]


@ways
@pytest.mark.parametrize("make", [by_leaf, without_gradient])
def test_a_leaf_that_layers_hold_by_closures(make: Callable[[Tensor], list[nn.Module]], way: Way) -> None:
    for held in (leaf(4, 4), nn.Parameter(torch.randn(4, 4))):
        held = held if make is not by_leaf else held.detach()[0].clone().requires_grad_()
        assert_equal_for(make(held), way, held)


@ways
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


@ways
def test_sparse_gradients_stay_sparse(way: Way) -> None:
    layers = [nn.Embedding(9, 4, sparse=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    plain, model = nn.Sequential(*copy.deepcopy(layers)), wrapped(layers, way)
    for size in (7, 2):
        value = torch.randint(0, 9, (size, 5))
        mean(plain(value), 0.25).backward()
        (model(value, target=0.25) * 1.0).backward()
    assert model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad.coalesce(), plain[0].weight.grad.coalesce())
    assert_same_tensors(model[2:], plain[2:])


@ways
def test_a_reentrant_checkpoint_is_refused_before_it_accumulates(way: Way) -> None:
    inside = module_of(lambda self, x: checkpoint(self.layer, x, use_reentrant=True), **linears("layer"))
    model = wrapped([nn.Linear(4, 4), inside, nn.Linear(4, 4), nn.Tanh()], way)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(torch.randn(7, 4), target=0.25)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}, {"schedule": "zb-h1"}])
def test_a_step_is_the_one_before_bit_by_bit_the_first_one_too(options: dict[str, Any]) -> None:
    """Gradients of a layer in two stages are summed in one order."""
    norm = nn.LayerNorm(64)
    model = SplitPipe(nn.Sequential(nn.Linear(64, 64), norm, nn.Tanh(), norm), [2, 2], devices=["cpu"] * 2, chunks=8,
                      **scheduled.inside(options))
    x, found = torch.randn(64, 64), []
    for _ in range(6):
        model.zero_grad()
        scheduled.loss_of(model, x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
