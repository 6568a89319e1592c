"""A loss of a schedule is an ordinary one, whatever is done with it; gradients of leaves: input, target, parameters."""
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
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import mean, mlp, twins
from tests.helpers.twin import Nothing, assert_same, assert_same_tensors
from tests.promise.layers import Apply

Way = tuple[str, dict[str, Any]]
WAYS: dict[str, Way] = {"1f1b": ("1f1b", {}), "zb-v": ("zb-v", {}),
                        "zb-v, checkpointed": ("zb-v", {"checkpoint": "always"}),
                        "zb-h1, autograd": ("zb-h1", {"backward": "autograd"})}
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


def assert_equal_for(layers: list[nn.Module], way: Way, *leaves: Tensor, given: Any = None, target: Any = 0.25,
                     loss_fn: Any = mean) -> None:
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


@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.parametrize("last", [nn.Tanh, lambda: nn.Linear(4, 4)])
def test_gradients_of_a_leaf_that_only_the_last_microbatch_uses_are_added(last: Any, by: str) -> None:
    held, x = leaf(4), torch.tensor([[-1.0], [1.0]]).repeat(1, 4).requires_grad_()
    layers = nn.Sequential(Apply(lambda rows: rows * (held if rows[0, 0] > 0 else 2)), last())
    _, model = twins(layers, None, balance=[2], by=by, chunks=2, checkpoint="always")
    [expected] = torch.autograd.grad(layers(x[1:]).sum(), held)
    for step in (1, 2):
        torch.autograd.grad(model(x * 1).sum(), [x, *model.parameters()])  # Which adds nothing.
        model(x).sum().backward(inputs=[x, *model.parameters()][:2])
        model(x).sum().backward()
        torch.testing.assert_close(held.grad, step * expected)


@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_a_parameter_that_only_the_last_microbatch_uses_has_its_hook_called(by: str) -> None:
    held, fired, x = nn.Parameter(torch.rand(4)), list[Tensor](), torch.tensor([[-1.0], [1.0]]).repeat(1, 4)
    expert = module_of(lambda self, rows: self.always(rows) * (self.held if rows[0, 0] > 0 else 2), held=held,
                       **linears("always"))
    _, model = twins(nn.Sequential(expert, nn.Tanh()), None, balance=[1, 1], by=by, chunks=2, checkpoint="always")
    held.register_hook(fired.append)
    model(x).sum().backward()
    assert_same(fired, [held.grad], "gradients")


@ways
def test_parameters_of_a_loss_function(way: Way) -> None:
    def loss(self: Any, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.scale * self.head(output), target)

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


CPU = ["cpu"] * 2


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_model_with_a_schedule_is_a_layer_of_another(loss: bool, backward: Any) -> None:
    """Which adds its loss, or its output."""
    def adding(self: Any, x: Tensor) -> Tensor:
        if not loss:
            return self.model(x) + x  # type: ignore[no-any-return]
        y = F.mse_loss(self.model(x), x) if isinstance(self.model, nn.Sequential) else self.model(x, target=x)
        return y.expand_as(x) + x  # type: ignore[no-any-return]

    plain = nn.Sequential(nn.Linear(4, 4), module_of(adding, model=mlp(4)), nn.Linear(4, 4))
    layers = copy.deepcopy(plain)
    layers[1].model = SplitPipe(layers[1].model, [2, 2], devices=CPU, chunks=2, schedule="1f1b", loss_fn=F.mse_loss)
    model = SplitPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=1 if loss else 3, schedule="zb-h1",
                      loss_fn=F.mse_loss, backward=backward)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for each in (model(x, target=y), F.mse_loss(plain(x), y)):
        each.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")


USED: dict[str, tuple[str, dict[str, Any]]] = {
    "zb-v": ("zb-v", {}), "zb-h1, autograd": ("zb-h1", {"backward": "autograd"}), "1f1b": ("1f1b", {}),
    "v-half, checkpointed": ("v-half", {"checkpoint": "always"}),
}


def scaled(module: nn.Module, loss: Tensor) -> None:
    loss *= 0.5
    loss.backward(torch.tensor(0.5))


def penalised(module: nn.Module, loss: Tensor) -> None:
    (loss + sum(parameter.square().sum() for parameter in module.parameters())).backward()


def again_and_again(module: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    (loss * 2).backward(retain_graph=True)
    for parameter in module.parameters():
        parameter.grad.mul_(2)  # type: ignore[union-attr]
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the .* a second time.*retain_graph=True"):
        loss.backward()


@pytest.mark.parametrize("way", few(2, USED))
@pytest.mark.parametrize("use", [
    *[lambda module, loss, factor=factor: (loss * factor).backward() for factor in (-3.0, 1.0, 0.0, 1e-300)],
    scaled, penalised, again_and_again,
])
def test_a_loss_may_be_scaled_added_to_and_differentiated_twice(use: Any, way: str) -> None:
    name, options = USED[way]
    plain, model = twins(mlp(5), name, 2, chunks=3, **options)
    x = torch.randn(7, 4)
    use(plain, mean(plain(x), 0.25))
    use(model, model(x, target=0.25))
    assert_same_tensors(model, plain)


def test_of_two_backwards_each_gives_its_own_inputs_gradient() -> None:
    layers = nn.Sequential(Apply(lambda pair: (pair[0] * 2, pair[1] * 3)), Apply(lambda pair: pair))
    a, b = (torch.rand(4, 3, requires_grad=True) for _ in range(2))
    y, z = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)((a, b))
    y.sum().backward(retain_graph=True)
    z.sum().backward()
    assert torch.equal(a.grad, torch.full((4, 3), 2.0)) and torch.equal(b.grad, torch.full((4, 3), 3.0))


def test_parameters_whose_gradients_are_one_tensor_are_scaled_once() -> None:
    layer = module_of(lambda self, x: (x + self.p) + self.q, **{k: nn.Parameter(torch.zeros(2, 3)) for k in "pq"})
    model = SplitPipe(nn.Sequential(layer, nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=1, schedule="1f1b",
                      loss_fn=mean)
    x = torch.rand(2, 3)
    (2 * model(x, target=0.25)).backward()
    found = layer.p.grad.clone(), layer.q.grad.clone()
    layer.zero_grad()
    (2 * mean(torch.tanh(layer(x)), 0.25)).backward()
    torch.testing.assert_close(found, (layer.p.grad, layer.q.grad))
