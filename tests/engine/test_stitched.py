"""``backward="autograd"``: one graph over all stages, in which everything works that autograd can do."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitpipe import SplitPipe
from tests.helpers.covering import pairwise
from tests.helpers.deferring import double as double
from tests.helpers.modules import Pop, Stash, linears, module_of, popping, stashing
from tests.helpers.twin import assert_same, assert_same_tensors, stages
from tests.promise.layers import forced

CHECKPOINTS = ["never", "except_last", "always"]
CHECKPOINT = pytest.mark.parametrize("checkpoint", CHECKPOINTS)


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *more, nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def stitched(module: nn.Sequential, balance: list[int] | None = None, by: str = "balance", **options: Any) -> SplitPipe:
    """A pipeline of a copy."""
    balance = balance or [len(module) - 1, 1]
    wrapped, where = stages(copy.deepcopy(module), balance, by)
    given = {"chunks": 3, "devices": ["cpu"] * len(balance), "backward": "autograd", **options}
    return SplitPipe(wrapped, **where, **given)


Results = Sequence[Tensor]


def penalty(model: nn.Module, x: Tensor) -> Results:
    """A loss with the gradient of the output in it."""
    y = model(x)
    [grad] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    loss = y.sum() + grad.square().sum()
    loss.backward()
    return [loss]


def hessian_products(model: nn.Module, x: Tensor) -> Results:
    parameters = [*model.parameters()]
    grads = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
    product = torch.autograd.grad(sum(grad.square().sum() for grad in grads), parameters, retain_graph=True)
    return [*product, *torch.autograd.grad(sum(grad.pow(3).sum() for grad in grads), parameters)]


def inner_loop(model: nn.Module, x: Tensor) -> Results:
    parameters = dict(model.named_parameters())
    inner = functional_call(model, parameters, (x,)).square().sum()
    grads = torch.autograd.grad(inner, [*parameters.values()], create_graph=True)
    moved = {name: p - 0.1 * grad for (name, p), grad in zip(parameters.items(), grads)}
    functional_call(model, moved, (x,)).square().sum().backward()
    return []


def parts_of_a_retained_graph(model: Any, x: Tensor) -> Results:
    y = model(x)
    y[:2].sum().backward(retain_graph=True)
    y[-1:].sum().backward(retain_graph=True, inputs=[model[0].weight])
    y.square().sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.square().sum().backward()
    return []


USES = [penalty, hessian_products, inner_loop, parts_of_a_retained_graph]


@pairwise(use=USES, by=["balance", "cuts"], checkpoint=CHECKPOINTS)
def test_what_autograd_can_do(use: Callable[[nn.Module, Tensor], Results], by: str, checkpoint: str) -> None:
    plain, given = mlp(), torch.rand(7, 4)
    model = stitched(plain, checkpoint=checkpoint, by=by)
    for _ in range(2):
        found, expected = (use(each, given.clone().requires_grad_()) for each in (model, plain))
        assert_same(found, expected, "results")
        assert_same_tensors(model, plain)


def writing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ELU(inplace=True), nn.Linear(5, 2))


@CHECKPOINT
def test_a_stage_that_writes_to_its_input_runs_again_in_each_backward(checkpoint: str) -> None:
    plain, x = writing(), torch.rand(7, 4)
    model = stitched(plain, [1, 2], checkpoint=checkpoint)
    for each in plain, model:
        parts_of_a_retained_graph(each, x)
    assert_same_tensors(model, plain)


def test_a_checkpointed_block_that_writes_to_its_input_is_an_error() -> None:
    model = stitched(writing(), [1, 2], "cuts", checkpoint="always")
    with pytest.raises(RuntimeError, match=r"block '1' \(ELU\) .* input was written to in place"):
        model(torch.rand(7, 4)).sum().backward()


@CHECKPOINT
def test_skips_have_second_derivatives(checkpoint: str) -> None:
    idle = [module_of(lambda _, x: x * 2, inner=kind("b")()) for kind in (stashing, popping)]  # It isn't called.
    plain = nn.Sequential(nn.Linear(4, 4), Stash(), idle[0], nn.Linear(4, 4), idle[1], Pop(), nn.Linear(4, 2))
    model, x = stitched(plain, [3, 1, 3], checkpoint=checkpoint), torch.rand(5, 4)
    for each in plain, model:
        penalty(each, x.clone().requires_grad_())
    assert_same_tensors(model, plain)


def test_what_a_node_has_saved_is_there_outside_of_a_backward() -> None:
    node = stitched(mlp(), checkpoint="always")(torch.rand(6, 4)).grad_fn
    while not hasattr(node, "_saved_mat1"):
        node = node.next_functions[0][0]
    assert node._saved_mat1.shape == (2, 3)


def energies(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiates through stages in its own code."""
    x = x.detach().requires_grad_()
    energy = self.two(self.one(x).tanh())
    [force] = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy, force


@CHECKPOINT
def test_a_layer_may_differentiate_in_its_forward(checkpoint: str) -> None:
    layers = [nn.Linear(4, 4), module_of(forced, layer=nn.Linear(4, 4)), nn.Linear(4, 4)]
    plain, x = nn.Sequential(*layers), torch.rand(6, 4)
    model = SplitPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint,
                      backward="autograd")
    for each in plain, model:
        each(x).square().sum().backward()
    assert_same_tensors(model, plain)


@CHECKPOINT
def test_forces_between_blocks(checkpoint: str) -> None:
    plain, x = module_of(energies, **linears("one", "two")), torch.rand(6, 4)
    model = SplitPipe(copy.deepcopy(plain), cuts=["two"], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint,
                      backward="autograd")
    for each in plain, model:
        energy, force = each(x)
        (energy.sum() + force.square().sum()).backward()
    assert_same_tensors(model, plain)
