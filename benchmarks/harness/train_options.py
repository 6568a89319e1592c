"""The options of train_gpt.py, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.harness.subject import even
from benchmarks.models import text
from benchmarks.models.gpt import gpt
from splitpipe import schedule

LAYERS_AROUND = 2  # the embedding before the blocks and the head after them
WARM_UP = 100  # steps
SHAPE = ("context", "width", "heads", "layers")  # the options that decide the shapes of the parameters


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage before them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.splitlines()[0]}\n")


def count(text: str) -> int:
    """A number of things, 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more; found {text}")
    return int(text)


def rate(text: str) -> float:
    """A learning rate."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, and finite; found {text}")
    return float(text)


def make_parser() -> Parser:
    """All options with their defaults."""
    parser = Parser("train_gpt.py", description="Train a small GPT on Python's help topics through SplitPipe.")

    def option(name: str, default: object, meaning: str, **more: Any) -> None:
        known = "" if default is None or default is False else " (default: %(default)s)"
        parser.add_argument(f"--{name}", default=default, help=meaning + known, **more)

    option("steps", 50, "training steps in all, those of a resumed run included", type=count)
    option("batch", 16, "windows of text a step", type=count)
    option("context", 128, "bytes a window", type=count)
    option("width", 128, "length of the vector of a byte; a multiple of the heads", type=count)
    option("heads", 4, "attention heads a block", type=count)
    option("layers", 4, "blocks; with embedding and head the Sequential has two layers more", type=count)
    option("lr", 2e-3, f"learning rate after {WARM_UP} steps; from there on it falls", type=rate)
    option("chunks", 4, "microbatches a step", type=count)
    order = "of forward and backward, with the loss inside; some have two stages a device (default: drop-in)"
    option("schedule", None, order, choices=schedule.names())
    option("devices", None, "as in: cpu cpu, or cuda:0 cuda:1 (default: all accelerators, or 2 CPU devices)", nargs="+")
    option("balance", None, "layers a stage, as in: 3 3 (default: even)", nargs="+", type=count)
    usual = "which microbatches to recompute in backward (default: except_last drop-in and for gpipe, else never)"
    option("checkpoint", None, usual, choices=("always", "except_last", "never"))
    option("autocast", False, "compute in bfloat16 under autocast", action="store_true")
    option("eval-every", 100, "steps between held-out losses; a checkpoint follows each", type=count)
    here = str(Path(tempfile.gettempdir(), "splitpipe-gpt.pt"))
    option("save", here, "where the checkpoint goes", metavar="PATH")
    option("resume", None, "checkpoint to continue from", metavar="PATH")
    return parser


def verify(options: argparse.Namespace) -> None:
    """Checks what would only fail after a while.

    Raises:
        ValueError: the options make no run.
    """
    longest = len(text.load()[1]) - 1
    if options.context > longest:
        raise ValueError(f"--context can be {longest} at most, as the held-out text; found {options.context}")
    if Path(options.save).is_dir() or not os.access(Path(options.save).absolute().parent, os.W_OK):
        raise ValueError(f"--save needs a file in a directory that can be written to; found {options.save}")


def devices(options: argparse.Namespace) -> list[str]:
    """Those that were given, or all accelerators, or two CPU devices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    known = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())] if accelerator else []
    return options.devices or known or ["cpu", "cpu"]


def balance(options: argparse.Namespace, count: int) -> list[int]:
    """Layers of each stage, on so many devices or in so many processes."""
    stages = count * schedule.build(options.schedule or "gpipe", 1, 1).stages
    return options.balance or even(options.layers + LAYERS_AROUND, stages)


def model(options: argparse.Namespace) -> torch.nn.Sequential:
    """The plain module, with the same weights every time.

    Raises:
        ValueError: the options make no module.
    """
    torch.manual_seed(0)
    return gpt(**{name: getattr(options, name) for name in SHAPE}, dropout=0.0)


def read(options: argparse.Namespace) -> dict[str, Any]:
    """The checkpoint to continue from.

    Raises:
        ValueError: it can't be used.
    """
    name = f"--resume {options.resume}"
    try:
        checkpoint: dict[str, Any] = torch.load(options.resume, map_location="cpu", weights_only=True)
        step, saved = checkpoint["step"], {each: checkpoint["options"][each] for each in SHAPE}
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except Exception as error:  # torch.load and what it unpickles raise whatever they meet
        raise ValueError(f"{name} is no checkpoint of this script ({type(error).__name__}: {error})") from None
    asked = {each: getattr(options, each) for each in SHAPE}
    if saved != asked:
        raise ValueError(f"{name} was trained with {saved}; found {asked}")
    if step >= options.steps:
        raise ValueError(f"{name} has done {step} steps, so --steps must be more; found {options.steps}")
    return checkpoint
