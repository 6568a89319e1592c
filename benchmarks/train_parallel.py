"""Pipeline, tensor and data parallelism together: each process runs a SplitPipe, whose layers it shares with others.

Four processes are 2 (data) x 2 (tensor). Those that share the layers see the same part of the batch, and talk inside
the layers (torch's DTensor); those with the same part of the layers talk once a step, about their gradients.

Example:
    torchrun --nproc-per-node 4 benchmarks/train_parallel.py --steps 5
    torchrun --nproc-per-node 4 benchmarks/train_parallel.py --steps 5 --schedule zb-h1 --check
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works, too

from splitpipe import SplitPipe, schedule

WIDTH, CLASSES, ROWS = 16, 8, 12  # rows of the whole batch
CHUNKS = 3
TOLERANCE = 1e-6
TIMEOUT = timedelta(seconds=60)  # of a collective whose other processes don't come


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), as after the attention of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def layers() -> nn.Sequential:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def share(block: nn.Module, mesh: DeviceMesh) -> None:
    """Has the processes of a mesh share a block: the columns of the first matrix, and the rows of the second."""
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def average(module: nn.Module, mesh: DeviceMesh) -> None:
    """Averages the gradients over the processes of a mesh, which have the same parts of the parameters.

    By hand, since DistributedDataParallel takes no DTensors, and torch's replicate, which would take them out, puts
    plain parameters in their place: a SplitPipe inside would not know that its layers are shared.
    """
    for parameter in module.parameters():
        grad = parameter.grad
        assert grad is not None
        own = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(own, group=mesh.get_group())
        own /= mesh.size()


def difference(module: nn.Module, plain: nn.Module) -> float:
    """The largest difference between their gradients."""
    largest = 0.0
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        largest = max(largest, (grad - other.grad).abs().max().item())
    return largest


def train(options: argparse.Namespace) -> float:
    """Trains; the largest difference to the gradients of one process, if it is to check."""
    module, halves = layers(), dist.get_world_size() // 2
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (halves, 2), mesh_dim_names=("data", "tensor"))
    for block in module[1:3]:
        share(block, mesh["tensor"])
    data = mesh["data"]
    stages = schedule.build(options.schedule, devices=2, chunks=CHUNKS).stages
    balance = [len(module) // stages] * stages
    model = SplitPipe(
        module, balance, devices=["cpu"] * 2, chunks=CHUNKS, schedule=options.schedule, loss_fn=F.cross_entropy,
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, plain)]
    largest = 0.0
    for step in range(options.steps):
        x, y = batch(step)
        mine = slice(data.get_local_rank(), None, data.size())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x[mine], target=y[mine])
        loss.backward()
        average(model, data)
        if options.check:
            F.cross_entropy(plain(x), y).backward()
            largest = max(largest, difference(model, plain))
        for optimizer in optimizers[: 1 + options.check]:
            optimizer.step()
        dist.all_reduce(total := loss.detach().clone(), group=data.get_group())
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {total.item() / data.size():.4f}", flush=True)
    return largest


def main() -> int:
    """Runs the script in one process of those that torchrun starts."""
    parser = argparse.ArgumentParser(description="Train a small model by pipeline x tensor x data parallelism.")
    parser.add_argument("--steps", type=int, default=5, help="training steps (default: %(default)s)")
    parser.add_argument("--schedule", choices=schedule.names(), default="gpipe", help="(default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare the gradients with those of one process")
    options = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes % 2 or ROWS % (processes // 2):
        parser.error(f"{processes} processes: expected 2, 4 or another even number, as in torchrun --nproc-per-node 4")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        largest = torch.tensor(train(options))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if options.check and dist.get_rank() == 0:
            print(f"largest difference between gradients: {largest:.1e}")
    finally:
        dist.destroy_process_group()
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without the interpreter's end. A thread of gloo drops a collective's tensors after it has woken those who wait,
    # and needs the interpreter for that. If that is ending, the thread is ended inside a destructor, and the process
    # aborts: "terminate called without an active exception". destroy_process_group ends such threads if nothing refers
    # to the groups any more, and something does where DTensors were. Seen without splitpipe (torch 2.13): four
    # processes that keep two groups and end after some all_reduce aborted in 10 of 12 runs, in none if they kept none.
    os._exit(code)
