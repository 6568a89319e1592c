"""One process of a contender: it builds its part, and then steps whenever it is told to."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import contenders
import measure
import ranks
import subject
import torch


def main(argv: Sequence[str] | None = None) -> None:
    """Answers each line of the standard input with a line of JSON, until there are no more.

    The lines: ``step`` trains once and gives the loss (or null) and the seconds of processor time; ``rest`` gives
    freed memory back to the system; ``peak`` gives the most bytes of memory so far, less those before the first step.
    """
    it = argparse.ArgumentParser("member.py", description=__doc__)
    it.add_argument("name", help="of the contender")
    it.add_argument("--preset", choices=sorted(subject.PRESETS), required=True, help="sizes of the model")
    it.add_argument("--chunks", type=int, required=True, help="microbatches")
    it.add_argument("--rank", type=int, default=0, help="of this process")
    it.add_argument("--meeting", metavar="PATH", help="a new file, by which processes of a contender find each other")
    options = it.parse_args(argv)
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    contender = next(each for each in contenders.contenders() if each.name == options.name)
    torch.set_num_threads(contender.threads)
    if contender.processes > 1:
        ranks.meet(options.rank, options.meeting)
    step = contender.start(subject.PRESETS[options.preset], options.chunks, options.rank)
    contenders.unwrapped(subject.case(subject.PRESETS["tiny"], 1), 0)()  # Loads autograd.
    rest()
    before = measure.resident()
    measure.forget_peak()
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), step, before)), file=answers)
    # Not finalized: a gloo thread that drops backward's context then would abort.
    os._exit(0)


def answer(word: str, step: subject.Step, before: int) -> dict[str, float | None]:
    """What ``word`` asks for."""
    if word == "step":
        began = time.process_time()
        loss = step()
        return {"loss": loss, "cpu": time.process_time() - began}
    if word == "peak":
        return {"peak": measure.peak() - before}
    if word == "rest":
        rest()
        return {}
    raise ValueError(f"found {word!r}: expected step, rest or peak")


def rest() -> None:
    """Gives freed memory back to the system, where the allocator can (glibc's)."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
