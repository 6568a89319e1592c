"""DistributedDataParallel around a pipeline: batches that give other microbatches, buffers, and failures."""
from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.twin import assert_same_tensors
from tests.helpers.world import SIZE, World, both

Way = dict[str, Any]
GRID: dict[str, Way] = {
    "never": {"checkpoint": "never"},
    "always": {"checkpoint": "always"},
    "except_last, autograd": {"checkpoint": "except_last", "backward": "autograd"},
    "1f1b": {"schedule": "1f1b"},
    "zb-h1, checkpointed": {"schedule": "zb-h1", "checkpoint": "always"},
}
WAYS = pytest.mark.parametrize("way", GRID.values(), ids=GRID.keys())


def pair(module: nn.Sequential, way: Way, balance: list[int]) -> tuple[nn.Sequential, SplitPipe]:
    """A copy of the module, and a pipeline of it."""
    loss_fn = F.mse_loss if "schedule" in way else None
    return copy.deepcopy(module), SplitPipe(module, balance, devices=["cpu"] * 2, chunks=3, loss_fn=loss_fn, **way)


def backward(parallel: Any, x: Tensor, way: Way) -> None:
    y = x.new_full((len(x), 3), 0.25)
    loss: Tensor = parallel(x, target=y) if "schedule" in way else F.mse_loss(parallel(x), y)
    loss.backward()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def train(rank: int, module: nn.Sequential, way: Way, balance: list[int], rows: tuple[int, ...]) -> None:
    """Trains both for some steps, each process on as many rows as it has, and compares after each backward."""
    from torch.nn.parallel import DistributedDataParallel

    plain, model = pair(module, way, balance)
    parallel = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (parallel, plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [torch.randn(count, 6, dtype=torch.float64) for count in rows]
        for x in batches:
            (F.mse_loss(plain(x), x.new_full((len(x), 3), 0.25)) / SIZE).backward()
        backward(parallel, batches[rank], way)
        assert_same_tensors(model, plain)
        for optimizer in optimizers:
            optimizer.step()


@WAYS
@both
def test_a_process_may_have_fewer_microbatches_than_the_other(rank: int, way: Way) -> None:
    train(rank, layers(), way, [2, 2], (1, 8))


def differently(rank: int, ways: tuple[Way, Way], balances: tuple[list[int], list[int]]) -> None:
    train(rank, layers(), ways[rank], balances[rank], (6, 6))


@pytest.mark.parametrize(
    "ways", [("never", "always"), ("never", "1f1b"), ("zb-h1, checkpointed", "1f1b")], ids=" and ".join
)
def test_processes_may_cut_and_schedule_the_module_differently(world: World, ways: tuple[str, str]) -> None:
    world.run(differently, (GRID[ways[0]], GRID[ways[1]]), ([1, 3], [3, 1]))


@WAYS
@both
def test_every_forward_starts_from_the_buffers_of_the_first_process(rank: int, way: Way) -> None:
    from torch.nn.parallel import DistributedDataParallel

    module = nn.Sequential(nn.BatchNorm1d(6), *layers()).double()
    with torch.no_grad():
        module.get_buffer("0.running_mean").add_(rank)  # Those of the first process count.
    plain, model = pair(module, {**way, "deferred_batch_norm": True}, [2, 3])
    alone, parallel = DistributedDataParallel(plain), DistributedDataParallel(model)
    for _ in range(3):
        x = torch.randn(SIZE, 9, 6, dtype=torch.float64)[rank]
        backward(parallel, x, way)
        alone(x).sum().backward()
        found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
        for name in "0.running_mean", "0.running_var", "0.num_batches_tracked":
            torch.testing.assert_close(found[name], expected[name])


class Faulty(nn.Module):
    """The tensor; forward or backward raises, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.faulty = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.faulty == "forward":
            raise ValueError("it is faulty")
        y = x.clone()
        if self.faulty and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, grad: Tensor) -> None:
        raise ValueError("it is faulty")


@pytest.mark.parametrize(
    ("way", "where"),
    [(GRID["always"], "forward"), (GRID["1f1b"], "backward")],
    ids=["always", "1f1b"],
)
@pytest.mark.thorough
@both
def test_an_exception_in_one_process_is_an_error_in_the_other(rank: int, way: Way, where: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    module = layers()
    module.insert(2, Faulty())
    model = pair(module, way, [2, 3])[1]
    dist.barrier()  # From here on both are quick, and the group's time is short.
    group = dist.new_group(timeout=timedelta(seconds=5))
    parallel = DistributedDataParallel(model, process_group=group)
    x = torch.randn(6, 6, dtype=torch.float64)
    if rank == 1:
        vars(model[2])["faulty"] = where
    with pytest.raises(ValueError, match="it is faulty") if rank == 1 else pytest.raises(RuntimeError):
        backward(parallel, x, way)
