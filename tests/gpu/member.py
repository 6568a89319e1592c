"""A part of the command in a process of its own, which leaves what it has found in a file, as JSON."""
from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import found as machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.member", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=["devices", "checks", "soak", "memory", "speed"])
    parser.add_argument("--kind", default="cuda", help="of devices (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of the soak and on reused memory (default: %(default)s)")
    parser.add_argument("--preset", default="tiny", help="the size of the GPT (default: %(default)s)")
    parser.add_argument("--into", type=Path, help="the file; without one it is printed")
    given = parser.parse_args(arguments)
    if given.part == "devices":
        told = machine.found()
    else:
        gc.collect()
        gc.freeze()  # Whoever counts tensors need not look through what was imported.
        told = _part(given.part, given.kind, given.steps, given.preset)
    text = json.dumps(told)
    if given.into is None:
        print(text)
    else:
        given.into.write_text(text)
    return 0


def _part(name: str, kind: str, steps: int, preset: str) -> dict[str, Any]:
    if name == "soak":
        return soaked(kind, steps)
    if name == "checks":
        return held(kind, steps)
    from . import weighed

    told: dict[str, Any] = (weighed.memory if name == "memory" else weighed.speed)(kind, preset)
    return told


def held(kind: str, steps: int) -> dict[str, Any]:
    """Tries each check.

    Args:
        kind: of the devices.
        steps: on reused memory.
    """
    import torch

    from .checks import checks, layers

    there, lacking, wrong = torch.accelerator.device_count(), Counter[str](), []
    skipped = []
    them = checks(steps)
    try:
        from tests.promise.layers import LAYERS
    except ModuleNotFoundError as error:
        skipped.append(f"the grid of layers: {error.name} is not installed")
    else:
        them += layers(list(LAYERS))
    tried, seconds = 0, {}
    for check in them:
        lacks = check.lacks(kind, there)
        if lacks is not None:
            lacking[lacks] += 1
            continue
        begun = time.monotonic()
        fault = _tried(check, kind)
        seconds[check.name] = round(time.monotonic() - begun, 2)
        tried += 1
        if fault is not None:
            wrong.append(f"{check.name}: {fault}")
    skipped += [f"{number} checks: {why}" for why, number in lacking.items()]
    said = f"{tried - len(wrong)} of {tried} checks hold"
    return {"result": said, "wrong": wrong, "skipped": skipped, "more": {"seconds": seconds}}


def _tried(check: Any, kind: str) -> str | None:
    """What is wrong with it."""
    import torch
    from torch.utils.checkpoint import set_checkpoint_early_stop

    torch.manual_seed(0)
    # A recomputation that stops early raises what the sanitizer's hooks trip over: torch's own, without a pipeline.
    early = "TORCH_CUDA_SANITIZER" not in os.environ
    try:
        with warnings.catch_warnings(), set_checkpoint_early_stop(early):
            warnings.simplefilter("error")
            check.holds(kind)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def first_line(error: object) -> str:
    """Of what it says; of a race that the sanitizer has seen, who met whom."""
    races = getattr(error, "errors", None)
    if isinstance(races, list) and races:
        said = [line for line in str(races[0]).splitlines() if " by stream " in line or "aten::" in line]
        return f"{len(races)} races, such as: {' '.join(said)}"
    return (str(error).strip().splitlines() or ["no message"])[0]


def soaked(kind: str, steps: int) -> dict[str, Any]:
    """Steps with faults of all sorts."""
    from tests.tools.soak import soak

    report = soak(steps, device=kind)
    print(report)
    return {
        "result": f"{sum(report.did.values())} steps with {len(report.counts)} models", "skipped": [],
        "wrong": [f"the soak leaves more behind with every model: {what}" for what in report.grown],
        "more": {"did": dict(report.did), "counts": [count._asdict() for count in report.counts]},
    }


def end(code: int) -> None:
    """Exits past the interpreter's end.

    A pass returns before autograd's thread of the device frees it, for which that takes the interpreter's lock. Where
    the interpreter is gone at that time, the process is aborted: "terminate called without an active exception".
    """
    atexit._run_exitfuncs()  # The pools' threads end, and coverage is written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
