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
from pathlib import Path

import torch

import splitpipe
from benchmarks.harness import contenders, measure
from benchmarks.harness.subject import MODELS, PRESETS, WHERE, Step, Subject, case, device


def main(argv: Sequence[str] | None = None) -> None:
    """Answers each line of the standard input with a line of JSON, until there are no more.

    The lines: ``step`` trains once and gives the loss (or null) and the seconds of processor time; ``rest`` gives
    freed memory back to the system; ``peak`` gives the most bytes of memory so far, less those before the first step.
    """
    parser = argparse.ArgumentParser("contender_process", description=__doc__)
    parser.add_argument("name", help="of the contender")
    parser.add_argument("--model", choices=list(MODELS), required=True, help="what it trains")
    parser.add_argument("--preset", choices=PRESETS, required=True, help="sizes of the model")
    parser.add_argument("--chunks", type=int, required=True, help="microbatches")
    parser.add_argument("--device", type=device, default="cpu", help=WHERE)
    parser.add_argument("--rank", type=int, default=0, help="of this process")
    parser.add_argument("--meeting", metavar="PATH",
                        help="a new file, by which processes of a contender find each other")
    options = parser.parse_args(argv)
    package = Path(splitpipe.__file__).resolve().parent
    if package != Path("splitpipe").resolve():
        raise RuntimeError(f"found splitpipe in {package}: expected that of the working directory")
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    subject = Subject(options.model, options.preset, options.chunks, options.device)
    known = [*contenders.contenders(subject), *contenders.compiled(subject)]
    contender = next(each for each in known if each.name == options.name)
    torch.set_num_threads(contender.threads)
    if contender.processes > 1:
        from benchmarks.harness import torch_pipelining

        torch_pipelining.meet(options.rank, options.meeting)
    step = contender.start(subject, options.rank)
    contenders.unwrapped(case(Subject("gpt", "tiny", 1)))[1]()  # Loads autograd.
    rest()
    before = sum(map(torch.cuda.memory_allocated, measure.gpus())) if measure.gpus() else measure.forget_peak()
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), step, before)), file=answers)
    # Not finalized: a gloo thread that drops backward's context then would abort.
    os._exit(0)


def answer(word: str, step: Step, before: int) -> dict[str, float | None]:
    """The answer to ``word``."""
    if word == "step":
        began = time.process_time()
        loss = step()
        measure.synchronize()
        return {"loss": loss, "cpu": time.process_time() - began}
    if word == "peak":
        return {"peak": growth(before)}
    if word == "rest":
        rest()
        return {}
    raise ValueError(f"found {word!r}: expected step, rest or peak")


def growth(before: int) -> int:
    """Bytes of memory at most, beyond ``before``: the GPUs', or else the process's."""
    if not measure.gpus():
        return measure.growth(before)
    return sum(map(torch.cuda.max_memory_allocated, measure.gpus())) - before


def rest() -> None:
    """Gives freed memory back to the system, where the allocator can (glibc's)."""
    gc.collect()
    torch.cuda.empty_cache()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
