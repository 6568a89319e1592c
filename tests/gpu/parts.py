"""The parts of the command, each in a process of its own within a time: whatever becomes of it is an outcome."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
#: What the tests need beside torch.
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "numpy")
#: The environment variable with the steps on memory that is used again.
STEPS = "SPLITPIPE_GPU_STEPS"
#: Seconds that a part may take; twice as many on slow devices.
LIMITS = {"devices": 180, "tests": 1800, "sanitizer": 1200, "soak": 900, "memory": 400, "speed": 400}
#: TFLOP/s below which a device is as slow as a CPU, and GiB of the first one that the large model needs.
SLOW, LARGE = 1.0, 60
#: Of a part's faults, how many get a sentence.
MOST = 20


@dataclass(frozen=True)
class Part:
    """What to run, and how."""

    name: str
    command: tuple[str, ...]  # It leaves JSON, or JUnit's XML, in a file whose name comes last.
    limit: float  # Seconds.
    environment: dict[str, str] = field(default_factory=dict)  # On top of this process's own.
    skipped: tuple[str, ...] = ()  # Of one without a command: what it can't try here, and why.


@dataclass(frozen=True)
class Outcome:
    """What became of a part: in a few words, and a sentence for each fault and for what it could not try."""

    part: str
    result: str
    seconds: float
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    more: Any = None  # Numbers.


def parts(told: dict[str, Any], steps: int | None) -> list[Part]:
    """All but the first, which has told what there is; ``steps``: None: 200, 20 on slow devices."""
    quick = min(its["TFLOP/s"] for its in told["devices"]) < SLOW
    preset = "quick" if quick else "large" if told["devices"][0]["GiB"] > LARGE else "small"
    count = steps or (20 if quick else 200)
    missing = [name for name in NEEDED if told["packages"][name] is None]

    def part(name: str, *words: str, **environment: str) -> Part:
        return Part(name, (sys.executable, "-m", *words), LIMITS[name] * (1 + quick), environment)

    def member(name: str) -> Part:
        return part(name, "tests.gpu.member", name, "--steps", str(count), "--preset", preset)

    def pytest(name: str, steps: int, *words: str, **environment: str) -> Part:
        if missing:
            return Part(name, (), 0, skipped=(f"{', '.join(missing)} not installed; pip install -e '.[test]'",))
        words = ("pytest", "-m", "cuda", "-q", "-p", "no:randomly", *words, "--junitxml")
        return part(name, *words, **environment, **{STEPS: str(steps)})

    # Default streams of all devices have one number, and the sanitizer asks for the current device's stream alone.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    sanitizer = pytest(
        "sanitizer", max(2, count // 10), "-p", "tests.gpu.sanitized", "tests/gpu/test_checks_cuda.py",
        "tests/devices/test_paths.py", "-k", "not ddp and (checks_cuda or layer or module) and not compiled",
        TORCH_CUDA_SANITIZER="1", CUDA_VISIBLE_DEVICES=first,
    )
    return [pytest("tests", count, *cuda_files()), sanitizer, member("soak"), member("memory"), member("speed")]


def cuda_files() -> list[str]:
    """The files that have tests marked ``cuda``."""
    return [str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("tests/**/test_*.py"))
            if "mark.cuda" in file.read_text(encoding="utf-8")]


def run(part: Part, room: Path) -> Outcome:
    """Runs a part, in a folder for what it prints and leaves; a crash, a hang or nothing left is an outcome, too."""
    if not part.command:
        return Outcome(part.name, "not run", 0.0, skipped=list(part.skipped))
    said, left = room / f"{part.name}.txt", room / f"{part.name}.left"
    left.unlink(missing_ok=True)
    begun = time.monotonic()
    fault = _finished(part, said, left)
    seconds = time.monotonic() - begun
    if not left.exists() or not left.stat().st_size:
        lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was printed")
        return Outcome(part.name, "failed", seconds, [f"{fault or 'it left no result'}: {last}"])
    its = _junit(left) if "pytest" in part.command else json.loads(left.read_text())
    wrong = list(its.get("wrong", []))
    if fault is not None and not wrong:
        wrong = [fault]
    return Outcome(part.name, its.get("result", ""), seconds, wrong, its.get("skipped", []), its.get("more", its))


def _finished(part: Part, said: Path, left: Path) -> str | None:
    """Why its process did not end well."""
    with said.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [*part.command, str(left)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env={**os.environ, **part.environment}, start_new_session=True,
        )
        try:
            code = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            return f"it was not done in {part.limit:g} s, and was stopped"
        finally:
            with suppress(ProcessLookupError):  # Its group is itself and what it has started.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" if code else None


def _junit(file: Path) -> dict[str, Any]:
    """What pytest's XML says: each test that failed, and why others were not run."""
    wrong: list[str] = []
    skipped: Counter[str] = Counter()
    passed = 0
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        faults = [*case.findall("failure"), *case.findall("error")]
        if faults:
            message = faults[0].get("message") or "no message"
            wrong.append(f"{name}: {message.splitlines()[0]}")
        elif (skip := case.find("skipped")) is not None:
            skipped[skip.get("message") or "no reason"] += 1
        else:
            passed += 1
    return {
        "result": f"{passed} tests passed, {len(wrong)} failed, {skipped.total()} were not run", "wrong": wrong,
        "skipped": [f"{number} tests: {why}" for why, number in skipped.items()],
        "more": {"passed": passed, "failed": len(wrong), "not run": skipped.total()},
    }
