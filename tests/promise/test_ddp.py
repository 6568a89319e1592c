"""DistributedDataParallel around a pipeline: two processes train as one would on the data of both."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.twin import assert_same_tensors, twins
from tests.helpers.world import SIZE, World, both

GRID = [
    ("split", "never"), ("autograd", "always"),
    *(pytest.param(*way, marks=pytest.mark.thorough) for way in (("split", "always"), ("autograd", "never"))),
]


class Spare(nn.Module):
    """A linear layer, and one that only some processes use."""

    def __init__(self, users: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.users = users
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.spare(x).sin() if self.rank in self.users else y


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), *more, nn.Linear(6, 3)).double()


def data(rank: int) -> Tensor:
    """A batch of the process, of another size than the other's, which three microbatches do not divide."""
    generator = torch.Generator().manual_seed(int(torch.randint(1000, ())) + rank)
    return torch.randn(5 + 2 * rank, 6, dtype=torch.float64, generator=generator)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x).square().mean()
    return loss


def train(
    rank: int, plain: nn.Sequential, model: SplitPipe, wrap: dict[str, Any], batches: int = 1,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> None:
    """Trains both for some steps of that many batches, and compares after each backward that communicates."""
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model, **wrap)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (parallel, plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in range(batches):
            seed = int(torch.randint(1000, ()))
            for process in range(SIZE):
                at(plain, process)
                torch.manual_seed(seed)
                (loss_of(plain, data(process)) / SIZE).backward()
            at(model, rank)
            torch.manual_seed(seed)
            with nullcontext() if batch + 1 == batches else parallel.no_sync():
                loss_of(parallel, data(rank)).backward()
        assert_same_tensors(model, plain)
        for optimizer in optimizers:
            optimizer.step()


def at(module: nn.Module, rank: int) -> None:
    for part in module.modules():
        if isinstance(part, Spare):
            part.rank = rank


def pair(module: nn.Sequential, backward: str, checkpoint: str) -> tuple[nn.Sequential, SplitPipe]:
    return twins(module, [2, len(module) - 2], chunks=3, backward=backward, checkpoint=checkpoint)


def plainly(rank: int, backward: str, checkpoint: str, wrap: dict[str, Any], batches: int) -> None:
    train(rank, *pair(layers(), backward, checkpoint), wrap, batches)


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
def test_two_processes_train_as_one_on_the_data_of_both(world: World, backward: str, checkpoint: str) -> None:
    world.run(plainly, backward, checkpoint, {}, 1)


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
def test_batches_without_sync_add_up(world: World, backward: str, checkpoint: str) -> None:
    world.run(plainly, backward, checkpoint, {}, 3)


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
def test_a_static_graph(world: World, backward: str, checkpoint: str) -> None:
    world.run(plainly, backward, checkpoint, {"static_graph": True}, 1)


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
def test_gradients_that_are_views_of_buckets(world: World, backward: str, checkpoint: str) -> None:
    world.run(plainly, backward, checkpoint, {"gradient_as_bucket_view": True}, 2)


def partly(rank: int, backward: str, checkpoint: str, users: tuple[int, ...]) -> None:
    train(rank, *pair(layers(Spare(users)), backward, checkpoint), {"find_unused_parameters": True})


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
def test_parameters_that_one_process_does_not_use(world: World, backward: str, checkpoint: str) -> None:
    world.run(partly, backward, checkpoint, (1,))


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
def test_parameters_that_no_process_uses_are_left_without_a_gradient(
    world: World, backward: str, checkpoint: str
) -> None:
    world.run(partly, backward, checkpoint, ())


def wrapped(backward: str, checkpoint: str) -> tuple[SplitPipe, Any]:
    from torch.nn.parallel import DistributedDataParallel

    model = pair(layers(), backward, checkpoint)[1]
    return model, DistributedDataParallel(model)


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
@both
def test_hooks_after_accumulation_are_called_once(rank: int, backward: str, checkpoint: str) -> None:
    model, parallel = wrapped(backward, checkpoint)
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    loss_of(parallel, data(rank)).backward()
    assert calls == Counter(dict(model.named_parameters()).keys())


@pytest.mark.parametrize(("backward", "checkpoint"), GRID)
@both
def test_each_gradient_is_sent_once(rank: int, backward: str, checkpoint: str) -> None:
    model, parallel = wrapped(backward, checkpoint)
    sizes: list[int] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().numel())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(None, hook)
    loss_of(parallel, data(rank)).backward()
    assert sum(sizes) == sum(parameter.numel() for parameter in model.parameters())
