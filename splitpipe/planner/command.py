"""The command line of plans: ``python -m splitpipe plan``."""
from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.planner.planning import DoesNotFitError, plan
from splitpipe.schedule.command import Parser, guarded

USAGE = """python -m splitpipe plan MODULE:NAME --sample SAMPLE [--target SAMPLE --loss NAME] [options]"""

EXAMPLES = """examples:
  python -m splitpipe plan train:model --sample train:batch --target train:labels --loss cross_entropy \\
      --devices cuda:0,cuda:1 --memory 20GiB --chunks 4,8 --json plan.json
  python -m splitpipe plan train:llama --sample input_ids=8x512:int64:32000,labels=8x512:int64:32000

MODULE:NAME is a name in a Python module, which is in the working directory or installed; if it is a function, it is
called, and its result is used. The module is imported, so its training loop has to be under if __name__ == "__main__".
A SAMPLE is such a name too, or a shape: 64x10 is normal random numbers, 64x10:int64:100 random integers from 0 to 99.
For a module that isn't an nn.Sequential, there may be one per argument, NAME=SAMPLE,NAME=SAMPLE, or the name of a dict
of them. The exit code is 0; 1 if no plan fits into the memory; 2 if the arguments are wrong.
"""

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::([a-z]\w*)(?::(\d+))?)?", re.ASCII)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.ASCII | re.IGNORECASE)


def main(arguments: Sequence[str]) -> int:
    """Runs the command given on the command line."""
    return guarded(lambda: _run(_parser().parse_args(arguments)), "splitpipe plan")


def _parser() -> Parser:
    parser = Parser("plan", USAGE, "Measures a module, and chooses how to split and run it with SplitPipe.", EXAMPLES)
    add = parser.add_argument
    add("module", metavar="MODULE:NAME", help="an nn.Module, or a function that returns one")
    add("--sample", required=True, metavar="SAMPLE", help="a whole batch")
    add("--target", metavar="SAMPLE", help="the batch's target, for --loss")
    add("--loss", dest="loss_fn", metavar="NAME",
        help="a function of torch.nn.functional, or MODULE:NAME: loss_fn(output, target). Without it, the plan is for "
             "drop-in, or for the loss that the module returns itself, if it isn't an nn.Sequential")
    add("--devices", type=lambda text: text.split(","), metavar="D,D,...",
        help="such as cuda:0,cuda:1 or cpu,cpu; default: all accelerators, or two CPU stages")
    add("--memory", type=_sizes, metavar="SIZE,...",
        help="memory that may be used, such as 20GiB: on each device, or one value per device; default: nine tenths "
             "of what is free")
    add("--chunks", type=_numbers, metavar="N,N,...", help="numbers of microbatches to choose from")
    add("--schedules", type=lambda text: text.split(","), metavar="NAME,...", help="to choose from; default: all")
    add("--optimizer-state", type=float, metavar="X",
        help="bytes that the optimizer keeps for each byte of parameters: 2 for Adam (default), 0 for plain SGD")
    add("--compile", action="store_true", help="for compiled layers, which takes the time to compile them")
    add("--seconds", type=float, metavar="S", help="how long to measure; default: 30")
    add("--html", metavar="FILE", help="write a page with the predicted step")
    add("--json", metavar="FILE", help="write the plan, for splitpipe.Plan.from_json")
    return parser


def _run(given: Namespace) -> None:
    options = {name: value for name, value in vars(given).items() if value is not None}
    for file in filter(None, [options.pop("html", None), options.pop("json", None)]):  # Before the long measurement.
        if os.path.isdir(file) or not os.path.isdir(os.path.dirname(file) or os.curdir):
            raise ValueError(f"{file!r} can't be written: expected the name of a file in an existing directory.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # As python -m does, to find modules in the working directory.
    module = _imported(given.module)
    options["module"] = module if isinstance(module, nn.Module) or not callable(module) else module()
    options.update({name: _sample(options[name]) for name in ("sample", "target") if name in options})
    if given.loss_fn is not None:
        loss_fn = _imported(given.loss_fn if ":" in given.loss_fn else f"torch.nn.functional:{given.loss_fn}")
        options["loss_fn"] = loss_fn() if isinstance(loss_fn, type) else loss_fn
    try:
        found = plan(**options)
    except DoesNotFitError as error:
        print(f"splitpipe plan: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except TypeError as error:
        if getattr(error, "__notes__", None):  # A layer raised it, so the traceback is useful.
            raise
        raise ValueError(str(error)) from error
    print(found)
    if given.html is not None:
        found.to_html(given.html)
        print(f"\nThe predicted step: {given.html}")
    if given.json is not None:
        found.to_json(given.json)


def _imported(text: str) -> Any:
    try:
        return resolve_name(text)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}. Expected MODULE:NAME, or a shape for a sample.") from error


def _sample(text: str) -> Any:
    if "=" in text:
        return {name: _sample(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    match = _SHAPE.fullmatch(text)
    if match is None:
        found = _imported(text)
        return found() if callable(found) and not isinstance(found, Tensor) else found
    shape, dtype = [int(number) for number in match[1].split("x")], getattr(torch, match[2] or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text}: torch has no dtype {match[2]!r}: expected a dtype such as float32 or int64.")
    try:
        return (torch.randint(max(1, int(match[3])), shape) if match[3] else torch.randn(shape)).to(dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{text}: torch can't make such a tensor: expected another shape or dtype.") from error


def _sizes(text: str) -> list[float] | float:
    sizes = []
    for part in text.split(","):
        match = _BYTES.fullmatch(part.strip())
        if match is None:
            raise ArgumentTypeError(f"{part!r} isn't a size: expected a size such as 20GiB or 900MB.")
        base = 1024 if match[3] or not match[2] else 1000
        sizes.append(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    return sizes if len(sizes) > 1 else sizes[0]


def _numbers(text: str) -> list[int]:
    try:
        return [*map(int, text.split(","))]
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: expected whole numbers, such as 4,8.") from None
