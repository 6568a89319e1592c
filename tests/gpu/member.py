"""A part of the command in a process of its own, which leaves what it has found in a file, as JSON."""
from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import found


def main() -> int:
    """Runs a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.member", description=__doc__)
    parser.add_argument("part", choices=["devices", "soak", "memory", "speed"])
    parser.add_argument("--steps", type=int, default=10, help="of the soak (default: %(default)s)")
    parser.add_argument("--preset", default="tiny", help="the size of the GPT (default: %(default)s)")
    parser.add_argument("into", type=Path, help="the file")
    given = parser.parse_args()
    if given.part == "devices":
        told = found.found()
    else:
        gc.collect()
        gc.freeze()  # Whoever counts tensors need not look through what was imported.
        from . import weighed

        told = soaked(given.steps) if given.part == "soak" else getattr(weighed, given.part)(given.preset)
    given.into.write_text(json.dumps(told))
    return 0


def soaked(steps: int) -> dict[str, Any]:
    """Steps with faults of all sorts."""
    from tests.tools.soak import soak

    report = soak(steps, device="cuda")
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
