"""Models of transformers on CUDA devices, drop-in and scheduled, and loaded by a device map: without hazards."""
from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import softcuda
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.test_transformers import TWO, WAYS, trained
from tests.clients.tiny import FOUR, MORE, Tiny
from tests.devices.log import settle

#: Makes the pipeline of a model.
Made = Callable[[nn.Module], nn.Module]


def main() -> int:
    """Trains those that are asked for; the exit status, 1 if anything is wrong."""
    every = {**FOUR, **MORE}
    parser = argparse.ArgumentParser(prog="python -m tests.softcuda clients --", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=[*every], metavar="MODEL", help=f"of {[*every]}")
    wrong = []
    for name in parser.parse_args().only:
        # What it hands on is of a class of its own, which can't be run again.
        ways = {"1f1b": WAYS["1f1b"]} if name == "gemma3n" else WAYS if name in FOUR else TWO
        made: dict[str, Made] = {way: partial(by_cuts, every[name], options) for way, options in ways.items()}
        if name in ("llama", "gpt2"):  # The head of one is its own, that of the other the embedding's.
            made.update({f"device_map, {by}": partial(by_map, every[name], by) for by in ("balanced", "splitpipe")})
        for way, make in made.items():
            found = faults(every[name], make)
            print(f"{name}, {way}: {'WRONG' if found else 'right'}", flush=True)
            wrong += [f"{name}, {way}: {what}" for what in found]
    wrong += softcuda.kernels()
    print(*[f"wrong: {what}" for what in wrong], sep="\n")
    return int(bool(wrong))


def by_cuts(tiny: Tiny, options: dict[str, Any], plain: nn.Module) -> nn.Module:
    """A copy of a model, cut where that is said."""
    devices = [f"cuda:{number % torch.cuda.device_count()}" for number in range(len(tiny.cuts) + 1)]
    return SplitPipe(copy.deepcopy(plain), cuts=tiny.cuts, devices=devices, chunks=2, **options)


def by_map(tiny: Tiny, by: str, plain: Any) -> nn.Module:
    """A model as accelerate has loaded it, by its own map or by splitpipe's, and attached."""
    with torch.device("meta"):
        empty = tiny.made()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        device_map = by if by == "balanced" else splitpipe.device_map(empty)
        model = type(plain).from_pretrained(folder, device_map=device_map, dtype=torch.float64).train()
    return splitpipe.attach(model)


def faults(tiny: Tiny, make: Made) -> list[str]:
    """What is wrong with a model in some way: values, hazards, an error."""
    settle()
    plain, batch = tiny.made(), tiny.batch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make(plain)
            expected, grads = trained(plain, batch)
            for _ in range(2):
                found, own = trained(model, {name: x.to("cuda:0") for name, x in batch.items()})
                for one, other in (found.loss, expected.loss), (found.logits, expected.logits), (own, grads):
                    torch.testing.assert_close(one, other, check_device=False)
    except Exception as error:
        traceback.print_exc()
        return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    return softcuda.hazards()


if __name__ == "__main__":
    sys.exit(main())
