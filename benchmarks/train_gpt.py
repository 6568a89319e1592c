"""Trains a byte-level GPT on real text: an ordinary PyTorch loop around one SplitPipe line.

Example:
    python benchmarks/train_gpt.py
    python benchmarks/train_gpt.py --schedule v-half
    torchrun --nproc-per-node 2 benchmarks/train_gpt.py --schedule v-half
    python benchmarks/train_gpt.py --devices cuda:0 cuda:1 --width 512 --layers 16 --chunks 8 --autocast
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works, too

from benchmarks.harness import torchrun, train_options
from benchmarks.harness.train_options import WARM_UP
from benchmarks.models import text
from splitpipe import SplitPipe

EVERY = 25  # steps between two lines about the progress
FIRST = 20  # steps that are repeated without a pipeline


def pipeline(layers: nn.Sequential, options: argparse.Namespace, devices: list[str]) -> SplitPipe:
    """The model in stages; with the loss inside, if a schedule needs it there.

    Raises:
        ValueError: the options make no pipeline.
    """
    return SplitPipe(
        layers, train_options.balance(options, len(devices)), devices=devices, chunks=options.chunks,
        schedule=options.schedule, checkpoint=options.checkpoint,
        loss_fn=None if options.schedule is None else loss_of,
    )


def train(options: argparse.Namespace, model: SplitPipe, resumed: dict[str, Any] | None) -> int:
    """Trains, prints held-out losses and the speed, proves the checkpoint on the plain module; the exit code."""
    devices = model.devices
    data, held_out = text.load()
    windows = text.windows(held_out, options.batch, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    start = 0
    if resumed is not None:
        model.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        start = resumed["step"]

    print(opening(options, start, devices), flush=True)
    first = last = evaluate(model, windows, devices, options.autocast)
    print(f"step {start}: held-out {first:.4f} nats a byte", flush=True)
    times: list[float] = []
    losses: list[float] = []
    for step in range(start, options.steps):
        began = time.perf_counter()
        nats = train_step(options, model, optimizer, data, step)
        times.append(time.perf_counter() - began)
        losses.append(nats)
        done, usual = step + 1, statistics.median(times)  # The first step takes longer than others.
        if len(times) == 3 or done % EVERY == 0:
            left = (options.steps - done) * usual
            print(f"step {done} of {options.steps}: loss {nats:.3f}, {left:.0f} s left", flush=True)
        if done % options.eval_every == 0 or done == options.steps:
            last = evaluate(model, windows, devices, options.autocast)
            print(f"step {done}: held-out {last:.4f} nats a byte", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "step": done, "options": vars(options)}, options.save)

    plain = train_options.model(options)
    plain.load_state_dict(torch.load(options.save, map_location="cpu", weights_only=True)["model"])
    again = evaluate(plain.to(devices[0]), windows, devices[:1], options.autocast)
    # The plain module multiplies larger matrices, whose sums round in another order.
    same = math.isclose(last, again, rel_tol=1e-2 if options.autocast else 1e-5)
    speed = f"{options.batch * options.context / statistics.median(times):.0f} tokens a second (median)"
    print(f"held-out {first:.4f} -> {last:.4f} nats a byte, {speed}, checkpoint {options.save}")
    verdict = "the same" if same else "NOT THE SAME"
    print(f"that checkpoint in the plain nn.Sequential: {again:.7f}, the model: {last:.7f}, {verdict}")
    if not start:
        steps = losses[:FIRST]
        plain = train_options.model(options).to(devices[0])
        optimizer = torch.optim.AdamW(plain.parameters(), lr=options.lr)
        most = max(abs(train_step(options, plain, optimizer, data, k) - nats) for k, nats in enumerate(steps))
        print(f"its first {len(steps)} steps without a pipeline: losses differ by at most {most:.1g}")
    return 0 if same else 1


def train_step(
    options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, step: int
) -> float:
    """One step of a pipeline or of the plain module; returns its loss in nats a byte."""
    # The batch follows from the step alone: a resumed run draws what a straight one does.
    torch.manual_seed(random.Random(str(step)).getrandbits(63))
    inputs, targets = text.batch(data, options.batch, options.context)
    for group in optimizer.param_groups:
        group["lr"] = rate(options.lr, step)

    devices = model.devices if isinstance(model, SplitPipe) else [next(model.parameters()).device]
    inside = isinstance(model, SplitPipe) and options.schedule is not None
    optimizer.zero_grad()
    with autocast(devices, options.autocast):
        x = inputs.to(devices[0])
        loss = model(x, target=targets) if inside else loss_of(model(x), targets)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def opening(options: argparse.Namespace, start: int, devices: Sequence[torch.device]) -> str:
    """A line that says what the run will do, and how to have it shorter."""
    where = ", ".join(map(str, devices))
    how = "drop-in" if options.schedule is None else f"with schedule {options.schedule}"
    return (
        f"{options.steps - start} steps of a GPT of {options.layers} blocks on {where}, {how}. The default, 50 steps, "
        f"takes half a minute on two idle CPU cores; fewer: --steps {max(1, options.steps // 10)}"
    )


def rate(most: float, step: int) -> float:
    """The learning rate of a step: it rises to the most, and falls from there on."""
    return most * min((step + 1) / WARM_UP, (WARM_UP / (step + 1)) ** 0.5)


def train_across(options: argparse.Namespace) -> int:
    """Trains in one of the processes that torchrun has started; the exit code.

    Raises:
        ValueError: the options make no such run.
    """
    torchrun.verify(options)
    windows = text.windows(text.load()[1], options.batch, options.context)

    def evaluated(plain: nn.Module) -> float:
        return evaluate(plain, windows, [torch.device("cpu")], bfloat16=False)

    return torchrun.train(options, lambda step: rate(options.lr, step), loss_of, evaluated, save)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes, in nats."""
    return F.cross_entropy(output.flatten(0, 1), targets.to(output.device).flatten())


def autocast(devices: Sequence[torch.device], enabled: bool) -> torch.autocast:
    """Computing in bfloat16 on the kind of these devices, or as without it."""
    return torch.autocast(devices[0].type, torch.bfloat16, enabled=enabled)


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Sequence[tuple[Tensor, Tensor]], devices: Sequence[torch.device], bfloat16: bool
) -> float:
    """The mean loss over all windows, in nats a byte."""
    model.eval()
    total = 0.0
    for inputs, targets in windows:
        with autocast(devices, bfloat16):
            loss = loss_of(model(inputs.to(devices[0])), targets)
        total += loss.item() * targets.numel()
    model.train()
    return total / sum(targets.numel() for _, targets in windows)


def save(checkpoint: dict[str, Any], path: str) -> None:
    """Write all of the checkpoint or leave what is there."""
    handle, partial = tempfile.mkstemp(dir=Path(path).absolute().parent, prefix=Path(path).name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(checkpoint, file)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def main(argv: list[str] | None = None) -> int:
    """Run the script on ``argv``; the exit code.

    Raises:
        SystemExit: after --help (code 0), or for bad options, said in one line on stderr (code 2).
    """
    parser = train_options.make_parser()
    options = parser.parse_args(argv)
    try:
        train_options.verify(options)
        if torchrun.started():
            return train_across(options)
        resumed = None if options.resume is None else train_options.read(options)
        model = pipeline(train_options.model(options), options, train_options.devices(options))
    except ValueError as error:
        parser.error(str(error))
    try:
        return train(options, model, resumed)
    except KeyboardInterrupt:
        print(f"train_gpt.py: interrupted; if it was saved, continue with --resume {options.save}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
