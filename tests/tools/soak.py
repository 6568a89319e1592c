"""Many steps of many models, with faults of all sorts: gradients stay right, and nothing is left behind.

    python -m tests.tools.soak --steps 2000

A step that fails leaves the model as it was, and the next one has the gradients of its module (``Case`` of
tests/faults). Whenever a model is dropped, threads, file handles, tensors and the package's own objects are counted:
after a while, no more of them may come.
"""
from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from splitpipe import schedule
from tests.faults.test_ops import Case
from tests.helpers.faults import ERRORS, SIGNALS, throws

SCHEDULES = [None, None, None, "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "v-half"]


def counted() -> dict[str, int]:
    """How much there is of what could grow."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return {
        "threads": threading.active_count(),
        "file handles": len(os.listdir("/proc/self/fd")),
        "tensors": sum(number for kind, number in kinds.items() if issubclass(kind, Tensor)),
        "own objects": sum(number for kind, number in kinds.items() if kind.__module__.split(".")[0] == "splitpipe"),
    }


def grown(counts: Sequence[dict[str, int]]) -> list[str]:
    """What is more at the end than ever in the first quarter of the models."""
    warm = counts[: max(1, len(counts) // 4)]
    return [f"{name}: {most} at first, {counts[-1][name]} at last" for name in counts[-1]
            if counts[-1][name] > (most := max(count[name] for count in warm))]


def drawn(draw: random.Random, device: str) -> Case:
    """A model with a schedule and options of chance, with all stages on one device."""
    name = draw.choice(SCHEDULES)
    per_device = 1 if name is None else schedule.build(name, 1, 1).stages
    return Case(per_device * draw.choice([1, 2] if per_device > 1 else [2, 3]), draw.choice([1, 2, 3, 4]), name, device,
                checkpoint=draw.choice(["always", "except_last", "never"]), backward=draw.choice(["split", "autograd"]),
                stash_limit=draw.choice([None, None, 0]))


def step(case: Case, draw: random.Random) -> None:
    """A step without a fault, with one, or thrown away; in the caller's thread or another."""
    call: Callable[[], object] = draw.choices([case.trains_on, partial(case.loss, case.model)], [10, 1])[0]
    elsewhere = draw.random() < 0.1
    if draw.random() < 0.5:
        error: type[BaseException] = draw.choice(ERRORS)
        act = throws(error("no"))
        if not elsewhere and draw.random() < 0.25:  # Signals come to the main thread.
            act, error = draw.choice([*SIGNALS.values()]), KeyboardInterrupt
        call = partial(case.fails, draw.choice(case.places), act, error, same=False)
    if elsewhere:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(call).result()
    else:
        call()


def soak(steps: int, seed: int = 0, device: str = "cpu") -> list[dict[str, int]]:
    """Takes the steps, drawn from the seed: what there was after each model.

    Raises:
        AssertionError: a gradient is wrong, a failed step has changed something, an error was not raised.
    """
    draw, threads, counts = random.Random(seed), set(threading.enumerate()), list[dict[str, int]]()
    life = max(8, min(40, steps // 10))
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    gc.freeze()  # What was there before is not counted, and not looked through each time.
    try:
        for _ in range(0, steps, life):
            case = drawn(draw, device)
            for _ in range(life):
                step(case, draw)
            if draw.random() < 0.5:
                vars(case.model)["itself"] = case.model  # Garbage, for the collector to find.
            del case
            for _ in range(60):  # A thread that is ending may hold what is to be collected.
                gc.collect()
                if not (left := set(threading.enumerate()) - threads):
                    break
                left.pop().join(0.5)
            counts.append(counted())
    finally:
        gc.unfreeze()
        torch.random.set_rng_state(random_state)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the stages (default: %(default)s)")
    counts = soak(**vars(parser.parse_args()))
    more = grown(counts)
    print(f"{len(counts)} models; " + (f"more and more {', '.join(more)}" if more else "flat"))
    sys.stdout.flush()
    # A thread of autograd's for a device may still free a pass, and would abort an interpreter that ends meanwhile.
    os._exit(int(bool(more)))
