"""Gradients of parameters with a schedule: unused, sparse, used in forward, after the step."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import mean
from tests.helpers.twin import assert_same_tensors
from tests.promise.layers import Checkpointed
from tests.training.test_leaves import WAYS, Way

ENGINES = pytest.mark.parametrize("backward", ["split", "autograd"])


def twins(layers: list[nn.Module], way: Way, **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    name, more = way
    return scheduled.twins(nn.Sequential(*layers), name, 2 if name == "zb-v" else 4, **{"chunks": 3, **more, **options})


def between(layer: nn.Module) -> list[nn.Module]:
    return [nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Tanh()]


def sometimes(self: Any, x: Tensor) -> Tensor:
    """Uses parameters in all microbatches, in those with a large number, and in none."""
    y: Tensor = self.layer(x)
    return torch.cat([y[k : k + 1] + self.spare(x[k]) if x.detach()[k].max() > 100 else y[k : k + 1]
                      for k in range(len(x))])


@WAYS
@pytest.mark.parametrize("large", [[], [0], [3], [6]])
def test_parameters_that_no_microbatch_uses_have_no_gradient(way: Way, large: list[int]) -> None:
    layer = module_of(sometimes, **linears("layer", "spare", "never"))
    plain, model = twins([layer, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], way)
    x = torch.randn(7, 4)
    x[large] = 200.0
    mean(plain(x), 0.25).backward()
    model(x, target=0.25).backward()
    assert_same_tensors(model, plain)
    assert model[0].never.weight.grad is None
    assert (model[0].spare.weight.grad is None) == (not large)


@WAYS
def test_sparse_gradients_stay_sparse(way: Way) -> None:
    plain, model = twins([nn.Embedding(9, 4, sparse=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()], way)
    for size in (7, 2):
        value = torch.randint(0, 9, (size, 5))
        mean(plain(value), 0.25).backward()
        (model(value, target=0.25) * 1.0).backward()
    assert model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad.coalesce(), plain[0].weight.grad.coalesce())
    assert_same_tensors(model[2:], plain[2:])


@WAYS
def test_a_reentrant_checkpoint_is_refused_before_it_accumulates(way: Way) -> None:
    _, model = twins(between(Checkpointed(nn.Linear(4, 4), True)), way)
    with pytest.raises(RuntimeError, match="use_reentrant") as caught:
        model(torch.randn(7, 4), target=0.25)
    assert any("expected use_reentrant=False" in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in model.parameters())


class Inward(nn.Module):
    """Goes backward inside its forward, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.norm, self.way = nn.Linear(4, 4), nn.LayerNorm(4), way

    def forward(self, input: Tensor) -> Tensor:
        weight = self.layer.weight.view(4, 4) if self.way == "view" else self.layer.weight
        inner = self.norm(F.linear(input.detach(), weight, self.layer.bias)).square().sum(0).mean()
        if self.way == "backward":
            inner.backward()
        elif self.way == "backwards":
            torch.autograd.backward([inner])
        else:
            asked = self.norm.bias if self.way == "not deferred" else self.layer.weight
            (found,) = torch.autograd.grad(inner, [asked], allow_unused=True)
            assert found is not None
            input = input + found.mean()
        return self.layer(input)


@ENGINES
@pytest.mark.parametrize("way", ["grad", "view", "backward", "backwards", "not deferred"])
def test_a_layer_may_go_backward_in_its_forward(way: str, backward: Any) -> None:
    scheduled.assert_transparent(nn.Sequential(nn.Linear(4, 4), Inward(way)), torch.randn(8, 4), "zb-h1",
                                 factor=3.0, chunks=1, backward=backward)


def penalised(self: Any, x: Tensor) -> Tensor:
    """Keeps a penalty for the loss outside."""
    self.penalty = self.w.square().sum()
    return x * self.w


def test_a_penalty_that_a_layer_has_kept_leads_to_its_parameter() -> None:
    layer, fired = module_of(penalised, w=nn.Parameter(torch.ones(4))), list[Tensor]()
    _, model = scheduled.twins(nn.Sequential(layer, nn.Linear(4, 4)), "1f1b", loss_fn=F.mse_loss, chunks=4)
    layer.w.register_hook(lambda grad: fired.append(grad.clone()))
    x, found = torch.randn(8, 4), []
    (0 * model(x, target=x) + layer.penalty).backward()
    assert layer.w.grad is not None and layer.w.grad.tolist() == [2.0] * 4
    assert torch.stack(fired).sum(0).tolist() == [2.0] * 4
    for _ in range(2):  # Nothing of a step is left for the next one.
        model.zero_grad()
        model(x, target=x).backward()
        found.append(layer.w.grad.clone())
    assert torch.equal(*found)


def probed(self: Any, x: Tensor) -> Tensor:
    """The input; keeps what a head makes of it, which nothing else comes from."""
    self.kept.append(self.head(x.detach()))
    return x * 1


@ENGINES
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_weight_gradient_may_come_after_its_step(name: str, backward: Any) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    layers = nn.Sequential(nn.Linear(4, 4), module_of(probed, **linears("head"), kept=[]), nn.Linear(4, 4))
    plain, model = scheduled.twins(layers, name, loss_fn=F.mse_loss, chunks=2, checkpoint="never", backward=backward)
    for module, loss in ((model, model(x, target=y)), (plain, F.mse_loss(plain(x), y))):
        (loss + torch.cat(module[1].kept).mean()).backward()
    assert_same_tensors(model, plain)


def test_gradients_of_a_shared_layer_are_summed_in_one_order() -> None:
    norm = nn.LayerNorm(64)
    _, model = scheduled.twins(nn.Sequential(nn.Linear(64, 64), norm, nn.Tanh(), norm), "1f1b", loss_fn=F.mse_loss,
                               chunks=8)
    x, found = torch.randn(64, 64), []
    for _ in range(6):
        model.zero_grad()
        model(x, target=x).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
