"""DistributedDataParallel around a schedule: two processes train as one would on the data of both."""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.scheduled import twins
from tests.helpers.world import World, both
from tests.promise.test_ddp import Spare, data, layers, train

WAYS = pytest.mark.parametrize(
    "way",
    [
        ("1f1b", {}), pytest.param(("zb-v", {}), marks=pytest.mark.thorough), ("zb-h1", {"checkpoint": "always"}),
        pytest.param(("v-half", {"backward": "autograd"}), marks=pytest.mark.thorough),
    ],
    ids=["1f1b", "zb-v", "zb-h1, checkpointed", "v-half, autograd"],
)
Way = tuple[str, dict[str, Any]]


def square(output: Tensor, target: Any) -> Tensor:
    return F.mse_loss(output, torch.full_like(output, target))


def pair(module: nn.Sequential, way: Way) -> tuple[nn.Sequential, SplitPipe]:
    name, options = way
    return twins(module, name, 2, loss_fn=square, chunks=3, **options)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = square(module(x), 0.25) if isinstance(module, nn.Sequential) else module(x, target=0.25)
    return loss


def plainly(rank: int, way: Way, wrap: dict[str, Any], batches: int) -> None:
    train(rank, *pair(layers(), way), wrap, batches, loss_of)


@WAYS
@pytest.mark.parametrize("users", [(1,), ()])
@both
def test_parameters_that_some_process_does_not_use(rank: int, way: Way, users: tuple[int, ...]) -> None:
    train(rank, *pair(layers(Spare(users)), way), {"find_unused_parameters": True}, loss_of=loss_of)


@WAYS
@both
def test_hooks_after_accumulation_are_called_once(rank: int, way: Way) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = pair(layers(), way)[1]
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    parallel = DistributedDataParallel(model)
    loss = parallel(data(rank), target=0.25)
    assert not calls
    loss.backward()
    assert calls == Counter(dict(model.named_parameters()).keys())


@WAYS
def test_two_processes_train_as_one_on_the_data_of_both(world: World, way: Way) -> None:
    world.run(plainly, way, {}, 1)


@WAYS
def test_batches_without_sync_add_up(world: World, way: Way) -> None:
    world.run(plainly, way, {}, 3)


@WAYS
@pytest.mark.parametrize("wrap", ["static_graph", "gradient_as_bucket_view"])
def test_other_ways_to_hold_gradients(world: World, way: Way, wrap: str) -> None:
    world.run(plainly, way, {wrap: True}, 1)
