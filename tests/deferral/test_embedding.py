"""Embeddings: the gradient of the table, deferred."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe.deferral import accumulator
from tests.helpers.deferring import Call, deferred, drop_in, in_more_ways, left, trained, tried
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_transparent, step, twins

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "": lambda: nn.Embedding(11, 6),
    "padding_idx": lambda: nn.Embedding(11, 6, padding_idx=3),
    "padding_idx, negative": lambda: nn.Embedding(11, 6, padding_idx=-2),
    "negative, in the call": lambda: Call(lambda x, w: F.embedding(x, w, -11), w=torch.randn(11, 6)),
    "int32": lambda: Call(lambda x, w: F.embedding(x.int(), w), w=torch.randn(11, 6)),
    "with and without padding": lambda: Call(
        lambda x, w: F.embedding(x, w, 2) + 2 * F.embedding(x, w) + 3 * F.embedding(x, w, 5), w=torch.randn(11, 6)),
    "one number a sample": lambda: Call(lambda x, w: F.embedding(x[:, 0], w), w=torch.randn(11, 6)),
    "twice": lambda: Call(lambda x, w: F.embedding(x, w) * F.embedding(x[:, :1], w), w=torch.randn(11, 6)),
}

def tokens(*shape: int) -> Tensor:
    """Numbers of rows, each of them in several microbatches."""
    return torch.randint(0, 11, shape)


@tried(LAYERS)
def test_an_embedding_is_deferred(name: str, way: dict[str, Any]) -> None:
    model = trained(LAYERS[name](), tokens(7, 5), **way)
    assert list(deferred(model).values()) == ["Embedding"]


@in_more_ways
def test_a_table_of_no_columns(way: dict[str, Any]) -> None:
    layer = Call(lambda x, w, b: F.embedding(x, w).sum(2) + b, w=torch.randn(11, 0), b=torch.randn(5))
    assert deferred(trained(layer, tokens(7, 5), **way)) == {"1.w": "Embedding"}


@pytest.mark.parametrize("way", [{"checkpoint": "never"}, {"checkpoint": "never", "stash_limit": 0}])
def test_a_renormalised_table_is_deferred(way: dict[str, Any]) -> None:
    # Each microbatch renormalises the rows it uses, before it uses them: as the whole batch does.
    model = trained(nn.Embedding(11, 6, max_norm=0.5), tokens(7, 5), **way)
    assert deferred(model) == {"1.weight": "Embedding"}


@pytest.mark.parametrize(("together", "kernels"), [(None, 1), (500, 8)])
def test_microbatches_share_a_kernel_that_is_not_too_large(
    together: int | None, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if together is not None:  # A microbatch has 4 * (8 + 48) bytes: two go together.
        monkeypatch.setattr(accumulator, "_TOGETHER", together)
    layers = nn.Sequential(nn.Embedding(11, 6), nn.Tanh())
    with torch.autograd.profiler.profile() as profile:
        assert_transparent(layers, tokens(16, 4), steps=1, chunks=8 if together is None else 16, checkpoint="never",
                           stash_limit=2**20)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::embedding_dense_backward"] == kernels + 1  # The pipeline's, and the plain module's.


@drop_in
@pytest.mark.parametrize("shape", [(11, 6), (6, 6)], ids=["", "square"])
def test_a_transposed_table_is_autograds(way: dict[str, Any], shape: tuple[int, int]) -> None:
    layer = Call(lambda x, w: F.embedding(x % 6, w.t()), w=torch.randn(*shape[::-1]))
    plain, model = twins(nn.Sequential(layer, nn.Tanh()), chunks=3, **way)
    for _ in range(2):
        x = tokens(7, 5)
        for module in (plain, model):
            module.zero_grad()
            step(module, x)
        torch.testing.assert_close(model[0].w.grad, plain[0].w.grad)
    assert left(model) == {"0.w": "embedding: its table is transposed"}


@drop_in
def test_a_table_that_counts_its_rows_is_autograds(way: dict[str, Any]) -> None:
    plain, model = twins(nn.Sequential(nn.Embedding(11, 6, scale_grad_by_freq=True), nn.Tanh()), chunks=3, **way)
    x = tokens(7, 5)
    model(x).square().sum().backward()
    for part in x.chunk(3):
        plain(part).square().sum().backward()
    assert left(model) == {"0.weight": "embedding: scale_grad_by_freq counts over each microbatch"}
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
