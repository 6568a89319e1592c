"""Models of transformers by cuts on CUDA devices, drop-in and scheduled: beside the model, and without hazards."""
from __future__ import annotations

import argparse
import copy
import sys
import traceback
import warnings
from typing import Any

import softcuda
import torch

from splitpipe import SplitPipe
from tests.clients.test_transformers import TWO, WAYS, trained
from tests.clients.tiny import FOUR, MORE, Tiny
from tests.devices.log import settle


def main() -> int:
    """Trains those that are asked for; the exit status, 1 if anything is wrong."""
    every = {**FOUR, **MORE}
    parser = argparse.ArgumentParser(prog="python -m tests.softcuda clients --", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=[*every], metavar="MODEL", help=f"of {[*every]}")
    wrong = []
    for name in parser.parse_args().only:
        # What it hands on is of a class of its own, which can't be run again.
        ways = {"1f1b": WAYS["1f1b"]} if name == "gemma3n" else WAYS if name in FOUR else TWO
        for way, options in ways.items():
            found = faults(every[name], options)
            print(f"{name}, {way}: {'WRONG' if found else 'right'}", flush=True)
            wrong += [f"{name}, {way}: {what}" for what in found]
    wrong += softcuda.kernels()
    print(*[f"wrong: {what}" for what in wrong], sep="\n")
    return int(bool(wrong))


def faults(tiny: Tiny, options: dict[str, Any]) -> list[str]:
    """What is wrong with a model in some way: values, hazards, an error."""
    settle()
    devices = [f"cuda:{number % torch.cuda.device_count()}" for number in range(len(tiny.cuts) + 1)]
    plain, batch = tiny.made(), tiny.batch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = SplitPipe(copy.deepcopy(plain), cuts=tiny.cuts, devices=devices, chunks=2, **options)
            expected, grads = trained(plain, batch)
            for _ in range(2):
                found, own = trained(model, {name: x.to(devices[0]) for name, x in batch.items()})
                for one, other in (found.loss, expected.loss), (found.logits, expected.logits), (own, grads):
                    torch.testing.assert_close(one, other, check_device=False)
    except Exception as error:
        traceback.print_exc()
        return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    return softcuda.hazards()


if __name__ == "__main__":
    sys.exit(main())
