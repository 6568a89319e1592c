"""train_gpt.py under torchrun: the same model, batches and schedule, with one process a row of the schedule."""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import train_options
from benchmarks.models import text

Rate = Callable[[int], float]
Loss = Callable[[Tensor, Tensor], Tensor]
Evaluate = Callable[[nn.Module], float]
Save = Callable[[dict[str, Any], str], None]

#: Options of the script that have no meaning here, and why.
LEFT_OUT = {
    "devices": "each process takes its own",
    "checkpoint": "torch.distributed.pipelining keeps all activations",
    "autocast": "its stages agree on one type",
    "resume": "a checkpoint is written whole, and read by the script without torchrun",
}


def started() -> bool:
    """Says if torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def verify(options: argparse.Namespace) -> None:
    """Checks the options under torchrun.

    Raises:
        ValueError: they make no run.
    """
    for name, why in LEFT_OUT.items():
        if getattr(options, name):
            raise ValueError(f"--{name} is not for torchrun: {why}")
    if options.batch % options.chunks:
        raise ValueError(f"--batch must be a multiple of --chunks; found {options.batch} and {options.chunks}")


def gathered(model: nn.Module) -> dict[str, Tensor] | None:
    """The state dict of the whole model in the first process; None in others."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object({name: x.cpu() for name, x in model.state_dict().items()}, parts)
    return None if parts is None else {name: x for part in parts for name, x in part.items()}


def train(options: argparse.Namespace, rate: Rate, loss_of: Loss, evaluated: Evaluate, save: Save) -> int:
    """Trains in a process, and prints held-out losses in the first process; the exit code.

    Args:
        options: of the script.
        rate: the learning rate of a step.
        loss_of: of output and target.
        evaluated: the held-out loss of the plain module.
        save: writes a checkpoint.
    """
    with group():
        return _trained(options, rate, loss_of, evaluated, save)


@contextmanager
def group() -> Iterator[None]:
    """The processes that torchrun has started, connected."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _trained(options: argparse.Namespace, rate: Rate, loss_of: Loss, evaluated: Evaluate, save: Save) -> int:
    from splitpipe.distributed import Pipeline  # Here, as not every torch has what it needs, nor one process any use.

    rank, size = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    plain = train_options.model(options) if rank == 0 else None
    balance = train_options.balance(options, size)
    model = Pipeline(
        train_options.model(options), balance, chunks=options.chunks, schedule=options.schedule or "gpipe",
        loss_fn=loss_of,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    data, _ = text.load()

    def held_out(step: int) -> float:
        state = gathered(model)
        if plain is None or state is None:
            return math.nan
        whole = {name: state[name] for name in plain.state_dict()}  # In its order, whichever process a layer is in.
        plain.load_state_dict(whole)
        loss = evaluated(plain)
        print(f"step {step}: held-out {loss:.4f} nats a byte", flush=True)
        if step:
            save({"model": whole, "step": step, "options": vars(options)}, options.save)
        return loss

    first = last = held_out(0)
    speeds = []
    for step in range(options.steps):
        began = time.perf_counter()
        # All processes draw the same batch: the first stage needs its input, the last one its target.
        torch.manual_seed(random.Random(str(step)).getrandbits(63))
        inputs, targets = text.batch(data, options.batch, options.context)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        model.step(inputs, targets)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        speeds.append(inputs.numel() / (time.perf_counter() - began))
        if (step + 1) % options.eval_every == 0 or step + 1 == options.steps:
            last = held_out(step + 1)
    if rank == 0:
        speed = f"{statistics.median(speeds):.0f} tokens a second (median)"
        print(f"held-out {first:.4f} -> {last:.4f} nats a byte, {size} processes, {speed}, checkpoint {options.save}")
    return 0
