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

from benchmarks.harness import torchrun
from benchmarks.harness.train_options import WARM_UP, Plan, make_parser, number_faults, plan, shape, stages_a_device
from benchmarks.models import text
from benchmarks.models.gpt import gpt
from splitpipe import SplitPipe
from splitpipe.balance import balance_by_time


def train(plan: Plan) -> int:
    """Train, print held-out losses and the speed, prove the checkpoint on the plain module; the exit code."""
    options, devices = plan.options, plan.devices
    inside = options.schedule != "gpipe" and not options.unwrapped
    data, held_out = text.load()
    windows = text.windows(held_out, options.batch, options.context)

    torch.manual_seed(options.seed)
    layers = gpt(**shape(options), dropout=options.dropout)
    if options.unwrapped:
        devices = devices[:1]
        model: nn.Module = layers.to(devices[0])
    else:
        balance = plan.balance or measured(layers, data, options, devices)
        more = {"schedule": options.schedule, "loss_fn": loss_of} if inside else {}
        chunks, checkpoint = options.chunks, options.checkpoint
        model = SplitPipe(layers, balance=balance, devices=devices, chunks=chunks, checkpoint=checkpoint, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    start = 0
    if plan.resumed is not None:
        model.load_state_dict(plan.resumed["model"])
        optimizer.load_state_dict(plan.resumed["optimizer"])
        start = plan.resumed["step"]

    print(opening(options, start, devices), flush=True)
    first = last = evaluate(model, windows, devices, options.autocast)
    print(f"step {start}: held-out {first:.4f} nats a byte", flush=True)
    speeds, shown = [], Progress(options.steps)
    for step in range(start, options.steps):
        began = time.perf_counter()
        # Batch and dropout follow from seed and step alone: a resumed run draws what a straight one does.
        torch.manual_seed(random.Random(f"{options.seed} {step}").getrandbits(63))
        inputs, targets = text.batch(data, options.batch, options.context)
        for group in optimizer.param_groups:
            group["lr"] = rate(options.lr, step)

        optimizer.zero_grad()
        with autocast(devices, options.autocast):
            x = inputs.to(devices[0])
            loss = model(x, target=targets) if inside else loss_of(model(x), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        nats = loss.item()
        seconds = time.perf_counter() - began
        speeds.append(inputs.numel() / seconds)
        shown.step(step + 1, nats, speeds[-1], seconds)
        if (step + 1) % options.eval_every == 0 or step + 1 == options.steps:
            last = evaluate(model, windows, devices, options.autocast)
            shown.line(f"step {step + 1}: held-out {last:.4f} nats a byte")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "step": step + 1, "options": vars(options)}, options.save)

    plain = gpt(**shape(options), dropout=options.dropout)
    plain.load_state_dict(torch.load(options.save, map_location="cpu", weights_only=True)["model"])
    again = evaluate(plain.to(devices[0]), windows, devices[:1], options.autocast)
    # The plain module multiplies larger matrices, whose sums round in another order.
    same = math.isclose(last, again, rel_tol=1e-2 if options.autocast else 1e-5)
    speed = f"{statistics.median(speeds):.0f} tokens a second (median)"
    print(f"held-out {first:.4f} -> {last:.4f} nats a byte, {speed}, checkpoint {options.save}")
    verdict = "the same" if same else "NOT THE SAME"
    print(f"that checkpoint in the plain nn.Sequential: {again:.7f}, the model: {last:.7f}, {verdict}")
    return 0 if same else 1


def opening(options: argparse.Namespace, start: int, devices: Sequence[torch.device]) -> str:
    """A line that says what the run will do, and how to have it shorter."""
    way = "without a pipeline" if options.unwrapped else f"by schedule {options.schedule}"
    where = ", ".join(map(str, devices))
    return (
        f"{options.steps - start} steps of a GPT of {options.layers} blocks on {where}, {way}; "
        f"the default takes 2 to 4 minutes on two CPU cores. Fewer steps: --steps {max(1, options.steps // 10)}"
    )


class Progress:
    """Shows the progress: on a terminal one line, written again at each step; elsewhere a line every so many steps."""

    EVERY = 25  # steps, where there is no terminal

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._terminal = sys.stdout.isatty()
        self._seconds: list[float] = []

    def step(self, number: int, loss: float, speed: float, seconds: float) -> None:
        """Says how far it is after a step that took so long; the first one takes longer than others."""
        self._seconds.append(seconds)
        if self._terminal or len(self._seconds) == 3 or number % self.EVERY == 0:
            left = (self._steps - number) * statistics.median(self._seconds)
            said = f"step {number} of {self._steps}: loss {loss:.3f}, {speed:.0f} tokens a second, {left:.0f} s left"
            print(f"\r{said:76}" if self._terminal else said, end="" if self._terminal else "\n", flush=True)

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        print(f"\r{text:76}" if self._terminal else text, flush=True)


def rate(most: float, step: int) -> float:
    """The learning rate of a step: it rises to the most, and falls from there on."""
    return most * min((step + 1) / WARM_UP, (WARM_UP / (step + 1)) ** 0.5)


def trained_across(options: argparse.Namespace) -> int:
    """Trains in one of the processes that torchrun has started; the exit code.

    Raises:
        ValueError: the options make no such run; the message names all that is wrong, in one line.
    """
    faults = number_faults(options) or torchrun.faults(options)
    if faults:
        raise ValueError("; ".join(faults))
    cpu = torch.device("cpu")
    windows = text.windows(text.load()[1], options.batch, options.context)

    def evaluated(plain: nn.Module) -> float:
        return evaluate(plain, windows, [cpu], bfloat16=False)

    return torchrun.train(options, lambda step: rate(options.lr, step), loss_of, evaluated, save)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes, in nats."""
    return F.cross_entropy(output.flatten(0, 1), targets.to(output.device).flatten())


def measured(model: nn.Module, data: Tensor, options: argparse.Namespace, devices: list[torch.device]) -> list[int]:
    """Layers a stage that take about equally long, for a microbatch of this run."""
    sample, _ = text.batch(data, -(-options.batch // options.chunks), options.context)
    with autocast(devices, options.autocast):
        balance = balance_by_time(len(devices) * stages_a_device(options), model, sample, device=devices[0])
    print(f"balance by time: {' '.join(map(str, balance))}")
    return balance


def autocast(devices: list[torch.device], enabled: bool) -> torch.autocast:
    """Computing in bfloat16 on the kind of these devices, or as without it."""
    return torch.autocast(devices[0].type, torch.bfloat16, enabled=enabled)


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Sequence[tuple[Tensor, Tensor]], devices: list[torch.device], bfloat16: bool
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


def written(path: str) -> int | None:
    """When the file was last written, None if there is none."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


def main(argv: list[str] | None = None) -> int:
    """Run the script on ``argv``; the exit code.

    Raises:
        SystemExit: after --help (code 0), or for bad options, said in one line on stderr (code 2).
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        if torchrun.started():
            return trained_across(options)
        chosen = plan(options)
    except ValueError as error:
        parser.error(str(error))
    before = written(options.save)
    try:
        return train(chosen)
    except KeyboardInterrupt:
        saved = written(options.save) != before
        left = f"continue with --resume {options.save}" if saved else "nothing was saved"
        print(f"train_gpt.py: interrupted; {left}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
