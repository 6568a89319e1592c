"""The options of train_gpt.py, and the run that follows from them, or all that is wrong with them in one line."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Plan:
    """A run: its options, checked, and what follows from them."""

    options: argparse.Namespace
    devices: list[torch.device]
    balance: list[int] | None  # None: measured
    resumed: dict[str, Any] | None  # the checkpoint to continue from


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage before them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> Parser:
    """All options with their defaults."""
    parser = Parser("train_gpt.py", description="Train a small GPT on Python's help topics through SplitPipe.")

    def option(name: str, default: object, meaning: str, **more: Any) -> None:
        known = "" if default is None or default is False else " (default: %(default)s)"
        parser.add_argument(f"--{name}", default=default, help=meaning + known, **more)

    option("steps", 500, "training steps in all, those of a resumed run included", type=int)
    option("batch", 16, "windows of text a step", type=int)
    option("context", 128, "bytes a window", type=int)
    option("width", 128, "length of the vector of a byte; a multiple of the heads", type=int)
    option("heads", 4, "attention heads a block", type=int)
    option("layers", 4, "blocks; with embedding and head the Sequential has two layers more", type=int)
    option("dropout", 0.0, "probability in [0, 1)", type=float)
    option("lr", 2e-3, f"learning rate after {WARM_UP} steps; from there on it falls", type=float)
    option("seed", 0, "where weights, batches and dropout come from", type=int)
    option("chunks", 4, "microbatches a step", type=int)
    order = "of forward and backward; gpipe is drop-in, others compute the loss inside, some have two stages a device"
    option("schedule", "gpipe", order, choices=schedule.names())
    option("stages", None, "pipeline stages (default: what all accelerators take, or 2 CPU devices)", type=int)
    option("devices", None, "one a stage, or a pair, if so scheduled, as in: cpu cpu, or cuda:0 cuda:1", nargs="+")
    option("balance", None, "layers a stage, as in: 3 3; or time, to measure (default: even)", nargs="+")
    usual = "which microbatches to recompute in backward (default: except_last for gpipe, else never)"
    option("checkpoint", None, usual, choices=("always", "except_last", "never"))
    option("autocast", False, "compute in bfloat16 under autocast", action="store_true")
    option("eval-every", 100, "steps between held-out losses; a checkpoint follows each", type=int)
    here = str(Path(tempfile.gettempdir(), "splitpipe-gpt.pt"))
    option("save", here, "where the checkpoint goes", metavar="PATH")
    option("resume", None, "checkpoint to continue from", metavar="PATH")
    option("unwrapped", False, "train the plain module on the first device, to compare", action="store_true")
    return parser


def plan(options: argparse.Namespace) -> Plan:
    """The run that ``options`` ask for.

    Raises:
        ValueError: they make no run; the message names all that is wrong, in one line.
    """
    faults = number_faults(options)
    names: list[str] = []
    balance, resumed = None, None
    if not faults:
        names, balance, faults = place(options)
    if Path(options.save).is_dir() or not os.access(Path(options.save).absolute().parent, os.W_OK):
        faults.append(f"--save needs a file in a directory that can be written to; found {options.save}")
    if options.resume is not None:
        resumed, more = read(options)
        faults += more
    if faults:
        raise ValueError("; ".join(faults))
    return Plan(options, [torch.device(name) for name in names], balance, resumed)


def number_faults(options: argparse.Namespace) -> list[str]:
    """Faults of the numbers, each by itself and with each other."""
    faults = []
    for name in ("steps", "batch", "context", "width", "heads", "layers", "chunks", "stages", "eval_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            faults.append(f"--{name.replace('_', '-')} must be 1 or more; found {value}")
    if options.heads > 0 and options.width % options.heads:
        faults.append(f"--width must be a multiple of --heads; found {options.width} and {options.heads}")
    if not 0 <= options.dropout < 1:
        faults.append(f"--dropout must be 0 or more and less than 1; found {options.dropout}")
    if not 0 < options.lr < math.inf:
        faults.append(f"--lr must be more than 0 and finite; found {options.lr}")
    if not 0 <= options.seed < 2**63:
        faults.append(f"--seed must be 0 or more and less than 2**63; found {options.seed}")
    longest = len(text.load()[1]) - 1
    if options.context > longest:
        faults.append(f"--context can be {longest} at most, as the held-out text; found {options.context}")
    return faults


def place(options: argparse.Namespace) -> tuple[list[str], list[int] | None, list[str]]:
    """The devices and the number of layers of each stage (None: to be measured), and what is wrong with them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    known = [] if accelerator is None else [f"{accelerator.type}:{index}" for index in range(count)]
    timed = options.balance == ["time"]
    if options.balance and not timed and not all(each.isdecimal() and int(each) for each in options.balance):
        found = " ".join(options.balance)
        return [], None, [f"--balance takes layers a stage, as in 3 3, or the word time; found {found}"]
    given = [] if timed else [int(each) for each in options.balance or ()]

    each = stages_a_device(options)
    stages = options.stages or len(options.devices or ()) * each or len(given) or (count or 2) * each
    layers = options.layers + LAYERS_AROUND
    places = stages // each
    names = options.devices or known[:places] or ["cpu"] * places
    faults = []
    unknown = [name for name in names if name not in ("cpu", *known)]
    if unknown:
        faults.append(f"--devices: no {' '.join(unknown)} here; this machine has {' '.join(['cpu', *known])}")
    if stages % each:
        faults.append(f"--schedule {options.schedule} puts {each} stages on each device; found {stages} stages")
    elif len(names) != places:
        need = "need as many" if each == 1 else f"of --schedule {options.schedule} need {places}"
        found = f"found {len(names)} ({' '.join(names)})"
        faults.append(f"{stages} stages {need} --devices, the same one twice if need be; {found}")
    if stages > layers:
        faults.append(f"{stages} stages need a layer each; found {layers}; give fewer stages or more --layers")
    if given and len(given) != stages:
        faults.append(f"--balance must name the layers of all {stages} stages; found {len(given)} numbers")
    if given and sum(given) != layers:
        what = f"the {layers} layers of the Sequential (embedding, {options.layers} blocks, head)"
        faults.append(f"--balance must sum to {what}; found {sum(given)}")
    return names, None if timed else given or even(layers, stages), faults


def read(options: argparse.Namespace) -> tuple[dict[str, Any] | None, list[str]]:
    """The checkpoint to continue from, and why it can't be used."""
    name = f"--resume {options.resume}"
    try:
        found = torch.load(options.resume, map_location="cpu", weights_only=True)
        step, saved = found["step"], found["options"]
        differing = [each for each in SHAPE if saved[each] != getattr(options, each)]
        if differing:
            trained = " ".join(f"--{each} {saved[each]}" for each in differing)
            asked = " ".join(f"--{each} {getattr(options, each)}" for each in differing)
            return None, [f"{name} was trained with {trained}; found {asked}"]
        with torch.device("meta"):
            wanted = gpt(**{each: saved[each] for each in SHAPE}, dropout=0.0).state_dict()
        if [(key, value.shape) for key, value in wanted.items()] != [
            (key, value.shape) for key, value in found["model"].items()
        ]:
            return None, [f"{name} does not hold the parameters of this model"]
        if not found["optimizer"]["state"].keys() == set(range(len(wanted))):
            return None, [f"{name} does not hold the state of this optimizer"]
        if step >= options.steps:
            return None, [f"{name} has done {step} steps, so --steps must be more; found {options.steps}"]
        return found, []
    except FileNotFoundError:
        return None, [f"{name}: no such file"]
    except Exception as error:  # torch.load and what it unpickles raise whatever they meet
        reason = (str(error).splitlines() or [""])[0]
        return None, [f"{name} is no checkpoint of this script ({type(error).__name__}: {reason})"]


def stages_a_device(options: argparse.Namespace) -> int:
    """How many stages of the schedule each device has."""
    return schedule.build(options.schedule, 1, 1).stages


def shape(options: argparse.Namespace) -> dict[str, int]:
    """The options that decide the shapes of the parameters."""
    return {name: getattr(options, name) for name in SHAPE}
