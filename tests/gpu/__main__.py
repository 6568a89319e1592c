"""What of the package holds on this machine's GPUs, in one command: tests, races, wear.

    python -m tests.gpu --out gpu

Each part runs in a process of its own, within a time: a crash or a hang is an outcome, too. A line is printed for each
thing that could not be tried, with the reason, and for each that is wrong. Where there is no GPU it ends with status 2:
``python -m tests.softcuda gpu`` runs all of it on torch's CUDA build without one.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: The environment variable with the number of steps on memory that is used again.
STEPS = "SPLITPIPE_GPU_STEPS"
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


class Part(NamedTuple):
    """What to run: arguments of Python, within so many seconds, with these variables on top of this process's own."""

    command: tuple[str, ...]
    limit: float
    environment: dict[str, str]


def parts(steps: int) -> dict[str, Part]:
    """All of them, by name."""
    pytest = ("-m", "pytest", "-m", "cuda", "-q", "-p", "no:randomly", "-rfEs")
    # Default streams of all devices have one number, and the sanitizer asks for the current device's stream alone.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    sanitized = (
        "-p", "tests.gpu.sanitized", "tests/gpu/test_checks_cuda.py", "tests/devices/test_paths.py",
        "-k", "not ddp and (checks_cuda or layer or module) and not compiled",
    )
    return {
        "tests": Part((*pytest, *cuda_files()), 3600, {STEPS: str(steps)}),
        "sanitizer": Part((*pytest, *sanitized), 2400, {
            STEPS: str(max(2, steps // 10)), "TORCH_CUDA_SANITIZER": "1", "CUDA_VISIBLE_DEVICES": first}),
        "soak": Part(("-m", "tests.tools.soak", "--steps", str(steps), "--device", "cuda"), 1800, {}),
    }


def cuda_files() -> list[str]:
    """The files with tests that need a CUDA device."""
    return [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.cuda" in file.read_text(encoding="utf-8")]


def run(name: str, part: Part, room: Path) -> dict[str, Any]:
    """Runs a part: its last line, and a line for each fault and each thing that was skipped; a file has all it said."""
    said, begun, fault = room / f"{name}.txt", time.monotonic(), ""
    with said.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env={**os.environ, **part.environment}, start_new_session=True,
        )
        try:
            code = process.wait(part.limit)
            fault = f"it ended with exit code {code}" if code > 0 else ""
            fault = f"it was ended by {signal.Signals(-code).name}" if code < 0 else fault
        except subprocess.TimeoutExpired:
            fault = f"it was not done in {part.limit:g} s, and was stopped"
        finally:
            with suppress(ProcessLookupError):  # Its group is itself and what it has started.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = said.read_text(encoding="utf-8", errors="replace")
    last = ([line.strip() for line in text.splitlines() if line.strip()] or ["nothing was printed"])[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", text, flags=re.MULTILINE)
    return {
        "part": name, "result": last, "seconds": time.monotonic() - begun,
        "wrong": failed or [f"{fault}: {last}"] * bool(fault),
        "skipped": re.findall(r"^SKIPPED (.*)", text, flags=re.MULTILINE),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status, 1 if anything is wrong, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where gpu.json goes, and what the parts print")
    parser.add_argument("--steps", type=int, default=200, help="of the soak, and on reused memory (%(default)s)")
    given = parser.parse_args(arguments)
    done = subprocess.run([sys.executable, "-c", MACHINE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    machine = json.loads(done.stdout.splitlines()[-1])
    if not machine["devices"]:
        print("wrong: found no GPU: expected a CUDA device. Without one, python -m tests.softcuda gpu runs all "
              "of it on torch's CUDA build", file=sys.stderr)
        return 2
    print(json.dumps(machine, indent=1))
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder) if given.out is None else given.out
        room.mkdir(parents=True, exist_ok=True)
        outcomes = []
        for name, part in parts(given.steps).items():
            print(f"{name} ...", flush=True)
            outcomes.append(outcome := run(name, part, room))
            print(f"{name}: {outcome['result']}, {outcome['seconds']:.0f} s", flush=True)
        report = {"date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "machine": machine, "parts": outcomes}
        (room / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = [f"{what}: {outcome['part']}: {line}" for outcome in outcomes
             for what, key in (("not tried", "skipped"), ("wrong", "wrong")) for line in outcome[key][:20]]
    wrong = any(outcome["wrong"] for outcome in outcomes)
    print(*lines, *["nothing is wrong"] * (not wrong), sep="\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
