"""Trains in all ways on CUDA devices, beside the unwrapped module: what is wrong, and what nothing orders.

The cases are those of the simulated devices (``tests/simdev/cases.py``), and the waits that are taken away one at a
time as well: a hazard has to be seen then.
"""
from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import softcuda
import torch

from tests.simdev import cases, sites
from tests.simdev.cases import Case

#: Cases of which part of the run, and the waits.
SORTS = ("paths", "layers", "autocast", "waits")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sorts that are asked for; the exit status, 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.softcuda hazards --", description=__doc__)
    names = ", ".join(SORTS)
    parser.add_argument("--only", nargs="+", choices=SORTS, default=SORTS, metavar="SORT", help=f"of {names}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="takes one case of N")
    given = parser.parse_args(arguments)
    print(f"{torch.cuda.device_count()} devices, torch {torch.__version__}", flush=True)
    wrong: list[str] = []
    for sort in given.only:
        begun = time.monotonic()
        found = [*(waits() if sort == "waits" else trained([*of(sort)][:: given.every]))]
        wrong += found
        print(f"{sort}: {len(found)} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    wrong += [f"a kernel that the CPU has not run: {kernel}" for kernel in softcuda.kernels()]
    print(*[f"wrong: {what}" for what in wrong], sep="\n")
    return int(bool(wrong))


def of(sort: str) -> Iterable[Case]:
    """Cases of that sort, with two and four stages."""
    if sort == "paths":
        yield from cases.paths(few=True)
        yield from cases.some(("chain", "pairs", "residuals"), ["checkpoint", "backward", "schedule"], stages=2)
    else:
        yield from cases.cast() if sort == "autocast" else cases.layers()


def trained(them: Sequence[Case]) -> Iterator[str]:
    """A line for each of what is wrong with them."""
    for case in them:
        yield from (f"{case}: {what}" for what in fault(case))
    print(f"{len(them)} cases", flush=True)


def fault(case: Case) -> list[str]:
    """What is wrong with a case: values that differ, hazards, an error."""
    try:
        found, _, faults = cases.compared(replace(case, kind="cuda"), begin, softcuda.hazards, lambda: 0)
    except Exception as error:
        traceback.print_exc()
        return [f"{type(error).__name__}: {error}"]
    return [*faults, *found]


def begin() -> None:
    """Waits for all there was: a case that is over has used memory on other streams than it was allocated on."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    softcuda.forget_hazards()


def waits() -> Iterator[str]:
    """Places that order streams, without which no hazard was seen."""
    for place, subject in sites.CAUGHT.items():
        with sites.watched(place):
            if not any("does not wait" in what for case in sites.few(subject) for what in fault(case)):
                yield f"no hazard is found without {place}"


if __name__ == "__main__":
    sys.exit(main())
