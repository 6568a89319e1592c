"""What runs in the environment: for each part a command, the variables of the fake, and what has to be installed."""
from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.parts import cuda_files
from tests.tools import covered

from .wheel import ROOT

#: Accesses that nothing orders are looked for. A query is not a wait then, which would hide some.
WATCHED = {"SOFTCUDA_HAZARDS": "2", "SOFTCUDA_LAG": "1000"}
#: Two of them reach each other's memory.
FOUR = {**WATCHED, "SOFTCUDA_DEVICES": "4", "SOFTCUDA_PEERS": "2"}
#: Tests of what the fake hasn't got, and why.
WITHOUT = {
    **{f"tests/gpu/test_checks_cuda.py::test_ddp_around_a_pipeline_takes_the_mean[{where}-each-nccl-{backward}]":
       "NCCL needs hardware" for where in ("one", "two") for backward in ("split", "autograd")},
}
#: For pytest, wherever it is started.
DESELECTED = {"PYTEST_ADDOPTS": " ".join(f"--deselect={test}" for test in WITHOUT)}


@dataclass(frozen=True)
class Part:
    """What to run."""

    about: str
    command: tuple[str, ...]  # Arguments of Python.
    variables: dict[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ("test",)  # Of setup.cfg, without which it can't run.
    skipped: dict[str, str] = field(default_factory=dict)  # What is left out of it, and why.


def parts() -> dict[str, Part]:
    """All of them, by name."""
    tests = ("-m", "pytest", "-m", "cuda", "-p", "no:randomly", *cuda_files())
    return {
        "tests": Part("pytest, all that is marked cuda", tests, {**DESELECTED, **FOUR}, skipped=WITHOUT),
        "gpu": Part("python -m tests.gpu, all its parts", ("-m", "tests.gpu", "--steps", "20"), DESELECTED,
                    skipped=WITHOUT),
        "hazards": Part(
            "of these, training in all ways; no two accesses to memory without an order", (*tests[:6], "tests/devices"),
            FOUR,
        ),
        "host": Part("python -m benchmarks.parts.host: the host's time for a step whose kernels take none",
                     ("-m", "benchmarks.parts.host"), {"SOFTCUDA_NUMBERS": "0", "SOFTCUDA_DEVICES": "8"}),
        "clients": Part("those of transformers models", (*tests[:6], "tests/clients"), WATCHED, ("test", "clients")),
        "python": Part("the environment's Python, with arguments of your own", ()),
    }


def run(part: Part, python: Path, more: Sequence[str]) -> int:
    """Runs a part, with more arguments; its exit status."""
    for what, why in part.skipped.items():
        print(f"left out: {what}: {why}", flush=True)
    words = [*part.command, *more]
    if words[:2] == ["-m", "pytest"]:
        words = covered.measuring(words)
    return subprocess.run([python, *words], cwd=ROOT, env=environment(part)).returncode


def environment(part: Part) -> dict[str, str]:
    """Its variables: this process's, the fake's, and those that the user has set by hand in place of these."""
    own = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    # Kernels of the CPU would start threads of OpenMP's in each of the package's.
    return {"OMP_NUM_THREADS": "1", **part.variables, **own}
