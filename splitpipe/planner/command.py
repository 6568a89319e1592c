"""The command line of plans: ``python -m splitpipe plan``."""
from __future__ import annotations

import inspect
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.planner.planning import DoesNotFitError, plan
from splitpipe.schedule.command import Parser, guarded, verify_apart

USAGE = """python -m splitpipe plan MODULE:NAME --sample SAMPLE [--target SAMPLE --loss NAME] [options]"""

EXAMPLES = """examples:
  python -m splitpipe plan train:model --sample 64x3x224x224
  python -m splitpipe plan train:make_model --sample 32x128:int64:50257 --target 32x128:int64:50257 --loss train:loss
  python -m splitpipe plan train:model --sample train:batch --target train:labels --loss cross_entropy \\
      --devices cuda:0 cuda:1 --memory 20GiB --chunks 4 8 --json plan.json
  python -m splitpipe plan train:llama --sample input_ids=8x512:int64:32000,labels=8x512:int64:32000

MODULE:NAME is a name in a Python module, which is in the working directory or installed; if it is a function, it is
called, and its result is used. The module is imported, so its training loop has to be under if __name__ == "__main__".
A SAMPLE is such a name too, or a shape: 64x10 is normal random numbers, 64x10:int64:100 random integers from 0 to 99.
For a module that isn't an nn.Sequential, there may be one per argument, NAME=SAMPLE,NAME=SAMPLE, or the name of a dict
of them. Lists may use spaces instead of commas. The exit code is 0; 1 if no plan fits into the memory; 2 if the
arguments are wrong.
"""

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::([a-z]\w*)(?::(\d+))?)?", re.ASCII)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.ASCII | re.IGNORECASE)
_WHO = "splitpipe plan"
_LISTS = "--devices", "--memory", "--chunks", "--schedules"


def parser() -> Parser:
    """The parser of ``python -m splitpipe plan``."""
    made = Parser(
        "plan", USAGE, "Measures a module, and chooses how to split and run it with SplitPipe.", EXAMPLES
    )
    add = made.add_argument
    add("module", metavar="MODULE:NAME", help="an nn.Module, or a function that returns one")
    add("--sample", required=True, metavar="SAMPLE", help="a whole batch")
    add("--target", metavar="SAMPLE", help="the batch's target, for --loss")
    add("--loss", dest="loss_fn", metavar="NAME",
        help="a function of torch.nn.functional, or MODULE:NAME: loss_fn(output, target). Without it, the plan is for "
             "drop-in, or for the loss that the module returns itself, if it isn't an nn.Sequential")
    add("--devices", metavar="D,D,...",
        help="such as cuda:0,cuda:1 or cpu,cpu; default: all accelerators, or two CPU stages")
    add("--memory", metavar="SIZE,...",
        help="memory that may be used, such as 20GiB: on each device, or one value per device; default: nine tenths "
             "of what is free")
    add("--chunks", metavar="N,N,...", help="numbers of microbatches to choose from")
    add("--schedules", metavar="NAME,...", help="schedules to choose from; default: all")
    add("--optimizer-state", type=float, default=2.0, metavar="X",
        help="bytes that the optimizer keeps for each byte of parameters: 2 for Adam (default), 0 for plain SGD")
    add("--compile", action="store_true", help="also try compiled layers, which takes the time to compile them")
    add("--seconds", type=float, default=30.0, metavar="S", help="how long to measure; default: 30")
    add("--html", metavar="FILE", help="write a page with the predicted step")
    add("--json", metavar="FILE", help="write the plan, for splitpipe.Plan.from_json")
    add("--no-progress", action="store_true", help="don't show a progress bar")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command given on the command line."""
    return guarded(lambda: _run(parser().parse_args(_joined(arguments))), _WHO)


def _joined(words: Sequence[str]) -> list[str]:
    """The words, with each list joined: what follows the name of a list, up to an option or a MODULE:NAME."""
    found: list[str] = []
    option = ""
    for word in words:
        if option and re.match(r"-|.*:(?!\d)", word) is None:
            found[-1:] = [option, word] if found[-1] is option else [f"{found[-1]},{word}"]
        else:
            found.append(word)
            option = word if word in _LISTS else ""
    return found


def _run(given: Namespace) -> None:
    files = [file for file in (given.html, given.json) if file is not None]
    verify_apart([os.path.realpath(file) for file in files])
    for file in files:  # Before the long measurement.
        if not file or os.path.isdir(file) or not os.path.isdir(os.path.dirname(file) or os.curdir):
            raise ValueError(f"{file!r} can't be written: expected the name of a file in an existing directory.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # As python -m does, to find modules in the working directory.
    module = _called(_found(given.module, "MODULE:NAME"), nn.Module)
    read = {
        "target": lambda text: _sample(text, "--target"), "loss_fn": _loss, "devices": _listed, "memory": _memory,
        "chunks": _numbers, "schedules": _listed,
    }
    options = {name: make(vars(given)[name]) for name, make in read.items() if vars(given)[name] is not None}
    try:
        found = plan(
            module, _sample(given.sample, "--sample"), **options, optimizer_state=given.optimizer_state,
            compile=given.compile, seconds=given.seconds, progress=False if given.no_progress else None,
        )
    except DoesNotFitError as error:
        with suppress(OSError, AttributeError):  # stderr may be missing or full.
            sys.stderr.write(f"{_WHO}: {error}\n")
        raise SystemExit(1) from None
    except TypeError as error:
        if getattr(error, "__notes__", None):  # A layer raised it, so the traceback is useful.
            raise
        raise ValueError(str(error)) from error
    except (RuntimeError, IndexError) as error:
        notes, shapes = getattr(error, "__notes__", None), _shapes(given)
        if not notes or not shapes:
            raise
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"the module can't be run on {shapes}: {said}. {notes[-1]} Expected shapes and dtypes that it takes."
        ) from error
    print(found)
    if given.html is not None:
        found.to_html(given.html)
        print(f"\nThe predicted step: {given.html}")
    if given.json is not None:
        found.to_json(given.json)


def _found(text: str, what: str) -> Any:
    """Imports MODULE:NAME."""
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute) or name.startswith("."):
        raise ValueError(f"found {text!r} for {what}: expected MODULE:NAME, such as train:model.")
    try:
        found: Any = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise ValueError(
            f"found no module {name!r} for {what}: expected one in the working directory ({os.getcwd()}), or installed."
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r} has no {attribute!r}: expected an existing name for {what}.")
        found = getattr(found, part)
    return found


def _called(found: Any, kind: type) -> Any:
    """The result of a function without arguments; another value as it is."""
    if isinstance(found, kind) or not callable(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        what = getattr(found, "__name__", found)
        raise ValueError(
            f"{what} can't be called without arguments ({error}): expected a function without arguments."
        ) from error
    except ValueError:
        pass  # Its signature is unknown.
    return found()


def _loss(text: str) -> Callable[..., Any]:
    found: Any = _found(text, "--loss") if ":" in text else getattr(nn.functional, text, None)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise ValueError(f"--loss {text}: expected a function of torch.nn.functional, or MODULE:NAME of one.")
    function: Callable[..., Any] = found
    return function


def _shapes(given: Namespace) -> str:
    """The options that give random numbers; empty if the user's own batch is given, which should fit."""
    texts = [(name, vars(given)[name]) for name in ("sample", "target") if vars(given)[name] is not None]
    if not all(_SHAPE.fullmatch(part.rpartition("=")[2]) for _, text in texts for part in text.split(",")):
        return ""
    return " and ".join([f"--{name} {text}" for name, text in texts])


def _sample(text: str, what: str) -> Any:
    if "=" in text:
        parts = [part.partition("=") for part in text.split(",")]
        return {name: _sample(value, what) for name, _, value in parts}
    match = _SHAPE.fullmatch(text)
    if match is None:
        return _called(_found(text, what), Tensor)
    shape = [int(number) for number in match[1].split("x")]
    dtype = getattr(torch, match[2] or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{what} {text}: torch has no dtype {match[2]!r}: expected a dtype such as float32 or int64.")
    random = dtype.is_floating_point or dtype.is_complex
    try:
        if match[3] is not None:
            return torch.randint(max(1, int(match[3])), shape).to(dtype)
        return torch.randn(shape).to(dtype) if random else torch.zeros(shape, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what} {text}: torch can't make such a tensor: expected another shape or dtype."
        ) from error


def _memory(text: str) -> list[float] | float:
    sizes = []
    for part in text.split(","):
        match = _BYTES.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"--memory {text}: {part!r} isn't a size: expected a size such as 20GiB or 900MB.")
        base = 1024 if match[3] or not match[2] else 1000
        sizes.append(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    return sizes if len(sizes) > 1 else sizes[0]


def _listed(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    try:
        return list(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"--chunks {text}: expected whole numbers, such as 4,8.") from None
