"""What of the package holds on this machine's GPUs, in one command: tests, races, wear, memory, speed.

    python -m tests.gpu --out gpu

Each part runs in a process of its own, within a time, and gets a line. At the end there is a sentence for each thing
that could not be tried, with the reason, and for each that is wrong. Where there is no GPU it ends with status 2:
``python -m tests.softcuda gpu`` runs all of it on torch's CUDA build without one.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import parts
from .parts import LIMITS, MOST, Outcome, Part

NAMES = ("tests", "sanitizer", "soak", "memory", "speed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status, 1 if anything is wrong, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where gpu.json goes, and what the parts print")
    parser.add_argument("--steps", type=int, help="of the soak and on reused memory (200; 20 where a GPU is as slow as "
                        "a CPU)")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="PART", help=f"of {', '.join(NAMES)} (all)")
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 1:
        parser.error(f"--steps is {given.steps}: expected 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder) if given.out is None else given.out
        room.mkdir(parents=True, exist_ok=True)
        told, outcomes = everything(room, given.only or NAMES, given.steps)
    if told and not told["devices"]:
        print("wrong: found no GPU: expected a CUDA device. Without one, python -m tests.softcuda gpu runs all "
              "of it on torch's CUDA build", file=sys.stderr)
        return 2
    wrong = [sentence for outcome in outcomes for sentence in sentences(outcome)]
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "command": " ".join(["python -m tests.gpu", *sys.argv[1:]]),
        "found": told, "parts": [asdict(outcome) for outcome in outcomes], "wrong": wrong,
    }
    if given.out is not None:
        (given.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("", *(f"not tried: {each.part}: {what}" for each in outcomes for what in each.skipped),
          *([f"wrong: {sentence}" for sentence in wrong] or ["nothing is wrong"]), sep="\n")
    return 1 if wrong else 0


def everything(room: Path, names: Sequence[str], steps: int | None) -> tuple[dict[str, Any], list[Outcome]]:
    """What there is, and what became of each part, the first of which looks at what there is."""
    look = parts.run(Part("devices", (sys.executable, "-m", "tests.gpu.member", "devices"), LIMITS["devices"]), room)
    if look.wrong:
        return {}, [look]
    told: dict[str, Any] = look.more
    print(json.dumps(told, indent=1))
    if not told["devices"]:
        return told, []
    outcomes = []
    for part in parts.parts(told, steps):
        if part.name in names:
            print(f"{part.name} ...", flush=True)
            outcomes.append(outcome := parts.run(part, room))
            judged = "WRONG, " if outcome.wrong else ""
            print(f"{part.name}: {judged}{outcome.result}, {outcome.seconds:.0f} s", flush=True)
    return told, outcomes


def sentences(outcome: Outcome) -> list[str]:
    """One for each thing that is wrong, but not more than some."""
    lines = [f"{outcome.part}: {what}" for what in outcome.wrong[:MOST]]
    more = len(outcome.wrong) - MOST
    return lines + [f"{outcome.part}: {more} more like these, which stand in the JSON"] * (more > 0)


if __name__ == "__main__":
    sys.exit(main())
