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
    return Case(
        per_device * draw.choice([1, 2] if per_device > 1 else [2, 3]), draw.choice([1, 2, 3, 4]), name, device,
        checkpoint=draw.choice(["always", "except_last", "never"]), backward=draw.choice(["split", "autograd"]),
        stash_limit=draw.choice([None, None, 0]),
    )


def step(case: Case, draw: random.Random) -> str:
    """A step without a fault, with one, or thrown away; in the caller's thread or another: what it was."""
    what = draw.choices(["without a fault", "thrown away", "fails"], [10, 1, 10])[0]
    elsewhere = draw.random() < 0.1
    call: Callable[[], object] = case.trains_on if what == "without a fault" else partial(case.loss, case.model)
    if what == "fails":
        error: type[BaseException] = draw.choice(ERRORS)
        what, act = error.__name__, throws(error("no"))
        if not elsewhere and draw.random() < 0.25:  # Signals come to the main thread.
            (what, act), error = draw.choice([*SIGNALS.items()]), KeyboardInterrupt
        call = partial(case.fails, draw.choice(case.places), act, error, same=False)
        what = f"{what} raised"
    if not elsewhere:
        call()
        return what
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()
    return f"{what}, in another thread"


def join(before: set[threading.Thread]) -> None:
    """Waits for the workers of models that are gone; a thread that is ending may hold what is to be collected."""
    for _ in range(60):
        gc.collect()
        if not (left := set(threading.enumerate()) - before):
            break
        left.pop().join(0.5)


def soak(steps: int, seed: int = 0, device: str = "cpu") -> tuple[Counter[str], list[dict[str, int]]]:
    """Takes the steps, drawn from the seed: how often what was done, and what there was after each model.

    Raises:
        AssertionError: a gradient is wrong, a failed step has changed something, an error was not raised.
    """
    draw, threads = random.Random(seed), set(threading.enumerate())
    did, counts = Counter[str](), list[dict[str, int]]()
    life = max(8, min(40, steps // 10))
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    gc.freeze()  # What was there before is not counted, and not looked through each time.
    try:
        while (done := did.total()) < steps:
            case = drawn(draw, device)
            did.update(step(case, draw) for _ in range(min(life, steps - done)))
            if draw.random() < 0.5:
                vars(case.model)["itself"] = case.model  # Garbage, for the collector to find.
            del case
            join(threads)
            counts.append(counted())
    finally:
        gc.unfreeze()
        torch.random.set_rng_state(random_state)
    return did, counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the stages (default: %(default)s)")
    did, counts = soak(**vars(parser.parse_args()))
    print(*[f"{number:6} {what}" for what, number in sorted(did.items())], sep="\n")
    more = grown(counts)
    print(f"{did.total()} steps with {len(counts)} models; " + (f"more and more {', '.join(more)}" if more else "flat"))
    return int(bool(more))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A thread of autograd's for a device may still free a pass, and would abort an interpreter that ends meanwhile.
    os._exit(code)
