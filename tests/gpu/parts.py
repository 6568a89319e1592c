"""The parts of the command, each in a process of its own within a time: a crash or a hang is an outcome, too."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The environment variable with the number of steps on memory that is used again.
STEPS = "SPLITPIPE_GPU_STEPS"


@dataclass(frozen=True)
class Part:
    """What to run."""

    command: tuple[str, ...]  # Arguments of Python.
    limit: float  # Seconds.
    environment: dict[str, str] = field(default_factory=dict)  # On top of this process's own.


@dataclass(frozen=True)
class Outcome:
    """What became of a part: its last line, and a line for each fault and for each thing that it could not try."""

    part: str
    result: str
    seconds: float
    wrong: list[str]
    skipped: list[str]


def parts(steps: int) -> dict[str, Part]:
    """All of them, by name."""
    pytest = ("-m", "pytest", "-m", "cuda", "-q", "-p", "no:randomly", "-rfEs")
    # Default streams of all devices have one number, and the sanitizer asks for the current device's stream alone.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    sanitized = ("-p", "tests.gpu.sanitized", "tests/gpu/test_checks_cuda.py", "tests/devices/test_paths.py",
                 "-k", "not ddp and (checks_cuda or layer or module) and not compiled")
    return {"tests": Part((*pytest, *cuda_files()), 3600, {STEPS: str(steps)}),
            "sanitizer": Part((*pytest, *sanitized), 2400, {
                STEPS: str(max(2, steps // 10)), "TORCH_CUDA_SANITIZER": "1", "CUDA_VISIBLE_DEVICES": first}),
            "soak": Part(("-m", "tests.tools.soak", "--steps", str(steps), "--device", "cuda"), 1800)}


def cuda_files() -> list[str]:
    """The files with tests that need a CUDA device."""
    return [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.cuda" in file.read_text(encoding="utf-8")]


def run(name: str, part: Part, room: Path) -> Outcome:
    """Runs a part; what it prints goes into a file of the folder."""
    said, begun = room / f"{name}.txt", time.monotonic()
    with said.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env={**os.environ, **part.environment}, start_new_session=True,
        )
        fault = ""
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
    skipped = re.findall(r"^SKIPPED (.*)", text, flags=re.MULTILINE)
    wrong = failed or [f"{fault}: {last}"] * bool(fault)
    return Outcome(name, last, time.monotonic() - begun, wrong, skipped)
