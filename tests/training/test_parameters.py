"""Gradients of parameters with a schedule: tied, frozen, unused, used in forward, of layers of every kind."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mean
from tests.helpers.twin import assert_same, assert_same_tensors
from tests.promise.layers import Checkpointed, First
from tests.training.test_leaves import WAYS, Way, wrapped

ENGINES = pytest.mark.parametrize("backward", ["split", "autograd"])


def assert_transparent(layers: list[nn.Module], value: Any, way: Way, **options: Any) -> SplitPipe:
    """Trains four layers, one a stage, beside their module."""
    name, more = way
    return scheduled.assert_transparent(nn.Sequential(*layers), value, name, 2 if name == "zb-v" else 4,
                                        **{"chunks": 3, **more, **options})


def twins(layers: list[nn.Module], way: Way, **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    name, more = way
    return scheduled.twins(nn.Sequential(*layers), name, 2 if name == "zb-v" else 4, **{"chunks": 3, **more, **options})


class Tied(nn.Module):
    """The embedding, transposed, as the head."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Many(nn.Module):
    """Parameters in a list and a dict, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(4, 4) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(4)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.several[0] @ self.several[1] @ self.several[0] * self.named["a"]
        return y


class Sum(nn.Module):
    """Two parameters whose gradients are one memory."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.view = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2)), view

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.view(self.a) + self.view(self.b))


class MaxNorm(nn.Linear):
    """Gives its weight other data in each forward; no more the second time."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
        return super().forward(x)


def embedded() -> list[nn.Module]:
    embedding = nn.Embedding(9, 4)
    return [embedding, nn.Linear(4, 4), nn.Tanh(), Tied(embedding)]


def freeze(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def between(layer: nn.Module) -> list[nn.Module]:
    return [nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Tanh()]


#: Beside those of the promise's own table.
KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "embedding and head": embedded,
    "a layer at two stages": lambda: [nn.Linear(4, 4), nn.Tanh()] * 2,
    "spectral norm": lambda: between(parametrizations.spectral_norm(nn.Linear(4, 4)).eval()),
    "frozen bias": lambda: [freeze(nn.Linear(4, 4), "bias"), nn.Tanh(), freeze(nn.Linear(4, 4), "weight"), nn.Tanh()],
    "lstm of two layers": lambda: [
        nn.Unflatten(1, (2, 2)), First(nn.LSTM(2, 3, 2, batch_first=True)), nn.Tanh(), nn.Linear(3, 4)],
    "embedding bag": lambda: [nn.EmbeddingBag(9, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()],
    "lists of parameters": lambda: between(Many()),
    "gradients of one memory": lambda: between(Sum(lambda w: w.view(4))),
    "gradients of one memory, transposed": lambda: between(Sum(lambda w: w.t().reshape(4))),
    "gradients of one memory, flattened": lambda: between(Sum(torch.flatten)),
}


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_more_kinds(kind: str, way: Way) -> None:
    value = torch.randint(0, 9, (7, 3)) if kind.startswith("embedding") else torch.randn(7, 4)
    assert_transparent(KINDS[kind](), value, way, chunks=1 if way[0] == "1f1b" else 3, factor=3.0)


class Sometimes(nn.Module):
    """A layer with parameters that all microbatches use, those with a large number, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return torch.cat([y[k : k + 1] + self.spare(x[k]) if x.detach()[k].max() > 100 else y[k : k + 1]
                          for k in range(len(x))])


@WAYS
@pytest.mark.parametrize("large", [[], [0], [3], [6]])
def test_parameters_that_no_microbatch_uses_have_no_gradient(way: Way, large: list[int]) -> None:
    plain, model = twins([Sometimes(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], way)
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


@WAYS
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_indices_are_counted_in_each_microbatch(layer: Any, way: Way) -> None:
    value = torch.randint(0, 5, (6, 3))
    layers = [layer(5, 4, scale_grad_by_freq=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    plain, model = twins(layers, way, chunks=2)
    model(value, target=0.25).backward()
    for part in value.chunk(2):
        (mean(plain(part), 0.25) / 2).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")


@WAYS
def test_a_lazy_layer_trains_from_its_first_step_on(way: Way) -> None:
    layers, x = between(nn.LazyLinear(4)), torch.randn(7, 4)
    model = wrapped(layers, way)
    loss = model(x, target=0.25)
    plain = nn.Sequential(*copy.deepcopy(layers))
    loss.backward()
    mean(plain(x), 0.25).backward()
    assert_same_tensors(model, plain)


class Written(nn.Module):
    """Its weight is a view of a frozen parameter, written to in place by something that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 1))
        self.start = torch.randn(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        view = nn.Parameter(self.start.clone(), requires_grad=False)[:]
        view.mul_(self.scale)
        return F.linear(x, view)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_a_view_that_was_written_to_is_left_to_autograd(name: str) -> None:
    scheduled.assert_transparent(nn.Sequential(Written(), nn.Tanh()), torch.randn(6, 4), name, checkpoint="never",
                                 chunks=3)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_data_that_a_layer_gives_its_parameter_stays(name: str) -> None:
    scheduled.assert_transparent(nn.Sequential(MaxNorm(4, 4), nn.Linear(4, 4)), torch.randn(8, 4), name, chunks=4)


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


class Penalised(nn.Module):
    """Keeps a penalty for the loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.w.square().sum()
        return x * self.w


def test_a_penalty_that_a_layer_has_kept_leads_to_its_parameter() -> None:
    layer, fired = Penalised(), []
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


class Probes(nn.Module):
    """The input; keeps what a head makes of it, which nothing else comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.kept = nn.Linear(4, 4), []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.head(x.detach()))
        return x * 1


@ENGINES
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_weight_gradient_may_come_after_its_step(name: str, backward: Any) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    plain, model = scheduled.twins(nn.Sequential(nn.Linear(4, 4), Probes(), nn.Linear(4, 4)), name, loss_fn=F.mse_loss,
                                   chunks=2, checkpoint="never", backward=backward)
    for module, loss in ((model, model(x, target=y)), (plain, F.mse_loss(plain(x), y))):
        (loss + torch.cat(module[1].kept).mean()).backward()
    assert_same_tensors(model, plain)


class Tying(nn.Module):
    """Ties in forward, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.b.weight = self.a.weight
        self.kept = self.a.bias
        return self.b(self.a(x))


class Marked(nn.Parameter):
    pass


def replace(layer: Any) -> None:
    if not isinstance(layer.weight, Marked):
        layer.weight = Marked(torch.ones(4, 4))


def test_parameters_that_a_forward_puts_elsewhere_stay_there() -> None:
    tying, replacing = Tying(), nn.Linear(4, 4)
    replacing.register_forward_pre_hook(lambda layer, _: replace(layer))
    weight, bias = tying.a.weight, tying.a.bias
    _, model = scheduled.twins(nn.Sequential(tying, replacing), "1f1b", loss_fn=F.mse_loss)
    for _ in range(2):
        model(x := torch.randn(8, 4), target=x).backward()
        assert tying.b.weight is weight and tying.a.weight is weight and tying.kept is bias
        assert type(replacing.weight) is Marked


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
