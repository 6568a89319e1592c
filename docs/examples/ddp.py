"""DistributedDataParallel over pipelines: each process trains a copy of the model on its part of the data.

    torchrun --nproc-per-node 2 docs/examples/ddp.py

The model is small and learns to tell the arms of a spiral apart. It needs only splitpipe. Each process has a pipeline
of two stages: on GPUs if there are two for each process, otherwise on the CPU.

On GPUs with a real model: replace `layers`, `BALANCE` (``splitpipe.plan`` proposes one) and `spirals`. The command
stays the same on four GPUs: the first process uses GPUs 0 and 1, the second 2 and 3. On eight, start four processes,
or give `BALANCE` four numbers. For a module that isn't a Sequential, write ``SplitPipe(module, cuts=[...],
devices=devices, sample=...)``. The sample moves the weights to their devices at once, which DDP needs to know.
"""
from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from splitpipe import SplitPipe

BALANCE = [4, 5]  # layers of each stage
STAGES, ARMS = len(BALANCE), 3


def layers(width: int = 64) -> nn.Sequential:
    """The model. DDP copies the weights of the first process to all others."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), *hidden, nn.Linear(width, ARMS))


def spirals(points: int = 3072) -> TensorDataset:
    """Points on the arms of a spiral, and the numbers of the arms: the same data in all processes."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(ARMS, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 4 * radius + 2 * torch.pi / ARMS * arm + 0.1 * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def shuffled(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    """The batches of one epoch after another."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(usage="torchrun --nproc-per-node 2 docs/examples/ddp.py [--steps N]")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, as above")
    first = int(os.environ["LOCAL_RANK"]) * STAGES
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) * STAGES
    devices = [f"cuda:{first + stage}" if on_gpus else "cpu" for stage in range(STAGES)]
    if on_gpus:
        torch.cuda.set_device(devices[0])
    dist.init_process_group("nccl" if on_gpus else "gloo")

    torch.manual_seed(0)
    model = DistributedDataParallel(SplitPipe(layers(), BALANCE, devices=devices, chunks=4))  # Without device_ids.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data := spirals())  # Gives each process its part.
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    losses = []
    for step, (points, arms) in enumerate(islice(shuffled(loader, sampler), steps), start=1):
        optimizer.zero_grad()
        output = model(points)
        loss = F.cross_entropy(output, arms.to(output.device))
        loss.backward()  # Averages the gradients over all processes.
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
