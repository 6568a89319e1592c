"""DistributedDataParallel around a pipeline: two processes train as one would on the data of both."""
from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers import scheduled, twin
from tests.helpers.world import SIZE, both

#: A schedule or none, and options.
Way = tuple[str | None, dict[str, Any]]
WAYS: dict[str, Way] = {
    "always": (None, {"checkpoint": "always"}),
    "never, autograd": (None, {"checkpoint": "never", "backward": "autograd"}),
    "1f1b": ("1f1b", {}),
    "zb-h1, always": ("zb-h1", {"checkpoint": "always"}),
    "zb-v": ("zb-v", {}),
    "v-half, autograd": ("v-half", {"backward": "autograd"}),
}
FEW = ("always", "never, autograd", "zb-h1, always")
ways = pytest.mark.parametrize("way", [
    pytest.param(way, id=name, marks=[] if name in FEW else pytest.mark.thorough) for name, way in WAYS.items()
])


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


def square(output: Tensor, target: Any) -> Tensor:
    return F.mse_loss(output, torch.full_like(output, target))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    """That of a module, or of what is around it, which may have the loss inside."""
    inside = any(isinstance(part, SplitPipe) and part._loss_fn is not None for part in module.modules())
    loss: Tensor = module(x, target=0.25) if inside else square(module(x), 0.25)
    return loss


def twins(module: nn.Sequential, way: Way) -> tuple[nn.Sequential, SplitPipe]:
    name, options = way
    if name is None:
        return twin.twins(module, [2, len(module) - 2], chunks=3, **options)
    return scheduled.twins(module, name, 2, loss_fn=square, chunks=3, **options)


def train(rank: int, plain: nn.Sequential, model: SplitPipe, wrap: dict[str, Any], batches: int = 1) -> None:
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
        twin.assert_same_tensors(model, plain)
        for optimizer in optimizers:
            optimizer.step()


def at(module: nn.Module, rank: int) -> None:
    for part in module.modules():
        if isinstance(part, Spare):
            part.rank = rank


@ways
@pytest.mark.parametrize(("wrap", "batches"), [
    ({}, 1), ({}, 3), ({"static_graph": True}, 1), ({"gradient_as_bucket_view": True}, 2),
], ids=["plainly", "without sync", "a static graph", "views of buckets"])
@both
def test_two_processes_train_as_one_on_the_data_of_both(
    rank: int, way: Way, wrap: dict[str, Any], batches: int
) -> None:
    train(rank, *twins(layers(), way), wrap, batches)


@ways
@pytest.mark.parametrize("users", [(1,), ()])
@both
def test_parameters_that_some_process_does_not_use(rank: int, way: Way, users: tuple[int, ...]) -> None:
    train(rank, *twins(layers(Spare(users)), way), {"find_unused_parameters": True})


@ways
@both
def test_hooks_after_accumulation_are_called_once_in_the_callers_backward(rank: int, way: Way) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = twins(layers(), way)[1]
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    loss = loss_of(DistributedDataParallel(model), data(rank))
    assert not calls
    loss.backward()
    assert calls == Counter(dict(model.named_parameters()).keys())


@ways
@both
def test_each_gradient_is_sent_once(rank: int, way: Way) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = twins(layers(), way)[1]
    parallel = DistributedDataParallel(model)
    sizes: list[int] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().numel())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(None, hook)
    loss_of(parallel, data(rank)).backward()
    assert sum(sizes) == sum(parameter.numel() for parameter in model.parameters())
