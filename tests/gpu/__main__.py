"""What of the package holds on this machine's GPUs, in one command: tests, races, wear.

    python -m tests.gpu --out gpu

Each part runs in a process of its own, within a time. A line is printed for each thing that could not be tried, with
the reason, and for each that is wrong. Where there is no GPU it ends with status 2: ``python -m tests.softcuda gpu``
runs all of it on torch's CUDA build without one. ``python benchmarks/run.py --device cuda`` measures speed and memory.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .parts import ROOT, parts, run

#: Prints what there is, as JSON. In a process of its own: one that asks a GPU has a context there.
MACHINE = """
import json, platform, torch
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
numbers = range(len(devices))
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(),
    "cuda": torch.version.cuda, "rocm": torch.version.hip,
    "devices": [{"name": its.name, "GiB": round(its.total_memory / 2**30, 1), "capability": [its.major, its.minor]}
                for its in devices],
    "peers": [[one == other or torch.cuda.can_device_access_peer(one, other) for other in numbers] for one in numbers],
}))
"""
#: The most lines that are printed of one part.
MOST = 20


def machine() -> dict[str, Any]:
    """The versions and devices of this machine."""
    done = subprocess.run([sys.executable, "-c", MACHINE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status, 1 if anything is wrong, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*parts(1)]
    parser.add_argument("--out", type=Path, metavar="DIR", help="where gpu.json goes, and what the parts print")
    parser.add_argument("--steps", type=int, default=200, help="of the soak, and on reused memory (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)} (all)")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}: expected 1 or more")
    found = machine()
    if not found["devices"]:
        print("wrong: found no GPU: expected a CUDA device. Without one, python -m tests.softcuda gpu runs all "
              "of it on torch's CUDA build", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder) if given.out is None else given.out
        room.mkdir(parents=True, exist_ok=True)
        for name, part in parts(given.steps).items():
            if name in (given.only or names):
                print(f"{name} ...", flush=True)
                outcomes.append(outcome := run(name, part, room))
                print(f"{name}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
    wrong = any(outcome.wrong for outcome in outcomes)
    for outcome in outcomes:
        for what, lines in ("not tried", outcome.skipped), ("wrong", outcome.wrong):
            print(*(f"{what}: {outcome.part}: {line}" for line in lines[:MOST]), sep="\n", end="\n" * bool(lines))
    if not wrong:
        print("nothing is wrong")
    if given.out is not None:
        report = {"date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "machine": found, "parts": [*map(asdict, outcomes)]}
        (given.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
