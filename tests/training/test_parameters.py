"""Gradients of parameters with a schedule: tied, frozen, parametrised, unused, of layers of every kind."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.helpers.deferring import double as double
from tests.helpers.scheduled import assert_transparent, mean, twins
from tests.helpers.twin import assert_same, assert_same_tensors
from tests.promise.layers import Checkpointed, First
from tests.training.test_leaves import WAYS, Way, wrapped


class Tied(nn.Module):
    """The embedding, transposed, as the head."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@WAYS
def test_embedding_and_head_are_tied(way: Way) -> None:
    embedding = nn.Embedding(9, 4)
    layers = nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), Tied(embedding))
    name, options = way
    model = assert_transparent(layers, torch.randint(0, 9, (7, 3)), name, 2 if name == "zb-v" else 4, chunks=3,
                               **options)
    assert model[0].weight is model[3].weight


@WAYS
def test_a_linear_layer_at_two_stages(way: Way) -> None:
    layer = nn.Linear(4, 4)
    name, options = way
    assert_transparent(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh()), torch.randn(7, 4), name,
                       2 if name == "zb-v" else 4, chunks=3, **options)


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
    name, options = way
    layers = nn.Sequential(Sometimes(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain, model = twins(layers, name, 2 if name == "zb-v" else 4, chunks=3, **options)
    x = torch.randn(7, 4)
    x[large] = 200.0
    mean(plain(x), 0.25).backward()
    model(x, target=0.25).backward()
    assert_same_tensors(model, plain)
    assert model[0].never.weight.grad is None
    assert (model[0].spare.weight.grad is None) == (not large)


@WAYS
def test_sparse_gradients_stay_sparse(way: Way) -> None:
    name, options = way
    layers = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    plain, model = twins(layers, name, 2 if name == "zb-v" else 4, chunks=3, **options)
    for size in (7, 2):
        value = torch.randint(0, 9, (size, 5))
        mean(plain(value), 0.25).backward()
        (model(value, target=0.25) * 1.0).backward()
    assert model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad.coalesce(), plain[0].weight.grad.coalesce())
    assert_same_tensors(model[2:], plain[2:])


#: Beside those of the promise's own table.
KINDS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], Any]]] = {
    "spectral norm": (lambda: [parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), nn.Tanh(), nn.Linear(4, 4),
                               nn.Tanh()], lambda: torch.randn(7, 4)),
    "frozen bias": (lambda: [freeze(nn.Linear(4, 4), "bias"), nn.Tanh(), freeze(nn.Linear(4, 4), "weight"), nn.Tanh()],
                    lambda: torch.randn(7, 4)),
    "lstm of two layers": (lambda: [nn.Linear(4, 4), First(nn.LSTM(4, 3, 2, batch_first=True)), nn.Tanh(),
                                    nn.Linear(3, 4)], lambda: torch.randn(7, 5, 4)),
    "embedding bag": (lambda: [nn.EmbeddingBag(9, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()],
                      lambda: torch.randint(0, 9, (7, 5))),
    "lists of parameters": (lambda: [Many(), nn.Tanh(), Many(), nn.Tanh()], lambda: torch.randn(7, 4)),
}


def freeze(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


class Many(nn.Module):
    """Parameters in a list and a dict, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(4, 4) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(4)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.several[0] @ self.several[1] @ self.several[0] * self.named["a"]
        return y


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_more_kinds(kind: str, way: Way) -> None:
    make, value = KINDS[kind]
    name, options = way
    assert_transparent(nn.Sequential(*make()), value(), name, 2 if name == "zb-v" else 4, chunks=3, **options)


@WAYS
def test_a_reentrant_checkpoint_is_refused_before_it_accumulates(way: Way) -> None:
    name, options = way
    module = nn.Sequential(nn.Linear(4, 4), Checkpointed(nn.Linear(4, 4), True), nn.Tanh(), nn.Linear(4, 4))
    _, model = twins(module, name, 2 if name == "zb-v" else 4, **options)
    with pytest.raises(RuntimeError, match="use_reentrant") as caught:
        model(torch.randn(7, 4), target=0.25)
    assert any("pass use_reentrant=False to it" in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in model.parameters())


@WAYS
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_scale_by_how_often_an_index_is_in_the_microbatch(layer: Any, way: Way) -> None:
    value = torch.randint(0, 5, (6, 3))
    layers = [layer(5, 4, scale_grad_by_freq=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    name, options = way
    plain, model = twins(nn.Sequential(*layers), name, 2 if name == "zb-v" else 4, chunks=2, **options)
    model(value, target=0.25).backward()
    parts = [mean(plain(part), 0.25) / 2 for part in value.chunk(2)]
    for part in parts:
        part.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")


@WAYS
def test_a_lazy_layer_is_trained_from_its_first_step_on(way: Way) -> None:
    layers = [nn.Linear(4, 4), nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 4)]
    model = wrapped(layers, way)
    x = torch.randn(7, 4)
    loss = model(x, target=0.25)
    plain = nn.Sequential(*copy.deepcopy(layers))
    loss.backward()
    mean(plain(x), 0.25).backward()
    assert_same_tensors(model, plain)
