"""The loss of a schedule is an ordinary loss: what is done with it, or not done, does to gradients what it always does.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import flat, mean, mlp, twins
from tests.helpers.twin import Nothing, assert_same, assert_same_tensors

WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param(("1f1b", {}), marks=pytest.mark.thorough), ("zb-v", {}),
        pytest.param(("v-half", {"checkpoint": "always"}), marks=pytest.mark.thorough),
        ("zb-h1", {"backward": "autograd"}),
    ],
    ids=["1f1b", "zb-v", "v-half, checkpointed", "zb-h1, autograd"],
)


def pair(way: tuple[str, dict[str, Any]] = ("zb-v", {})) -> tuple[nn.Sequential, SplitPipe]:
    name, options = way
    return twins(mlp(5), name, 2, chunks=3, **options)


def losses(plain: nn.Module, model: SplitPipe, x: Tensor) -> tuple[Tensor, Tensor]:
    return mean(plain(x), 0.25), model(x, target=0.25)


@WAYS
def test_a_loss_thrown_away_leaves_gradients_alone(way: Any) -> None:
    plain, model = pair(way)
    model(torch.randn(7, 4), target=0.25)
    assert all(parameter.grad is None for parameter in model.parameters())
    x = torch.randn(7, 4)
    for loss in losses(plain, model, x):
        loss.backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    model(torch.randn(7, 4), target=0.25)
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())
    assert_same_tensors(model, plain)


@pytest.mark.thorough
@WAYS
def test_passes_leave_no_tensor_and_no_thread_behind(way: Any) -> None:
    _, model = pair(way)

    def train() -> None:
        model.zero_grad()
        model(torch.randn(7, 4, requires_grad=True), target=0.25).backward()

    assert flat(train)


def scaled(module: nn.Module, loss: Tensor) -> None:
    loss *= 0.5
    loss.backward()


def penalised(module: nn.Module, loss: Tensor) -> None:
    (loss + sum(parameter.square().sum() for parameter in module.parameters())).backward()


def again_and_again(module: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    (loss * 2).backward(retain_graph=True)
    for parameter in module.parameters():
        parameter.grad.mul_(2)  # type: ignore[union-attr]
    loss.backward()


def without_gradient(module: nn.Module, loss: Tensor) -> None:
    Nothing.apply(loss).backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in module.parameters())
    loss.backward()


@WAYS
@pytest.mark.parametrize("use", [
    *[lambda module, loss, factor=factor: (loss * factor).backward() for factor in (3.0, -1.0, 1.0, 0.0, 1e-300)],
    lambda module, loss: loss.backward(torch.tensor(0.5)), scaled, penalised, again_and_again, without_gradient,
])
def test_a_loss_may_be_scaled_added_to_and_differentiated_twice(use: Any, way: Any) -> None:
    plain, model = pair(way)
    for module, loss in zip((plain, model), losses(plain, model, torch.randn(7, 4))):
        use(module, loss)
    assert_same_tensors(model, plain)


def test_gradients_from_a_kept_graph_are_the_users_own() -> None:
    plain, model = pair()
    for module, loss in zip((plain, model), losses(plain, model, torch.randn(7, 4))):
        loss.backward(retain_graph=True)
        for grad in [*torch.autograd.grad(loss, list(module.parameters()), retain_graph=True),
                     *[parameter.grad for parameter in module.parameters()]]:
            grad.zero_()
        loss.backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("factor", [1, 2])
def test_gradients_are_handed_over_and_not_copied(factor: int) -> None:
    _, model = twins(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "zb-h1", 2, chunks=4)
    loss = model(torch.randn(8, 4), target=0.25)
    releases = [following for following, _ in loss.grad_fn.next_functions if following is not None]
    memory = {total.value.data_ptr() for release in releases for total in release.totals}
    (loss * factor).backward()
    assert {parameter.grad.data_ptr() for parameter in model.parameters()} == memory


@WAYS
def test_a_second_backward_needs_a_kept_graph(way: Any) -> None:
    plain, model = pair(way)
    for loss in losses(plain, model, torch.randn(7, 4)):
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the .* a second time.*retain_graph=True"):
            loss.backward()
    assert_same_tensors(model, plain)


def test_second_derivatives_are_refused() -> None:
    _, model = pair()
    loss = model(torch.randn(7, 4), target=0.25)
    with pytest.raises(RuntimeError, match=r"create_graph=True .* compute the loss from model\(x\)"):
        loss.backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()


def test_autograd_grad_of_some_parameters_then_backward() -> None:
    plain, model = pair()
    x = torch.randn(7, 4, requires_grad=True)
    found: list[Any] = []
    for module, loss in zip((plain, model), losses(plain, model, x)):
        found.append(torch.autograd.grad(loss, [module[2].weight, x], retain_graph=True))
        loss.backward(inputs=[module[0].bias], retain_graph=True)
        assert module[0].weight.grad is None and x.grad is None
        loss.backward(inputs=list(module.parameters()))
    assert_same(found[1], found[0], "gradients")
    assert_same_tensors(model, plain)


def test_parameters_may_be_written_to_between_loss_and_backward() -> None:
    """The gradients are there already; autograd itself would refuse."""
    plain, model = pair()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for module, loss in zip((plain, model), losses(plain, model, torch.randn(7, 4))):
        if module is model:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        loss.backward()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before):
            parameter.copy_(value)
    assert_same_tensors(model, plain)
