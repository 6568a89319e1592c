"""What runs in the environment: for each part a command, and the variables of the fake."""
from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu.__main__ import cuda_files
from tests.tools import covered

from .wheel import ROOT

#: Accesses that nothing orders are looked for. A query is not a wait then, which would hide some. Of the four devices
#: two reach each other's memory.
FOUR = {"SOFTCUDA_HAZARDS": "2", "SOFTCUDA_LAG": "1000", "SOFTCUDA_DEVICES": "4", "SOFTCUDA_PEERS": "2"}
#: Tests of NCCL, which needs hardware.
WITHOUT = [f"tests/gpu/test_checks_cuda.py::test_ddp_around_a_pipeline_takes_the_mean[{where}-each-nccl-{backward}]"
           for where in ("one", "two") for backward in ("split", "autograd")]
#: For pytest, wherever it is started.
DESELECTED = {"PYTEST_ADDOPTS": " ".join(f"--deselect={test}" for test in WITHOUT)}


class Part(NamedTuple):
    """What to run: what people are told of it, arguments of Python, and variables."""

    about: str
    command: tuple[str, ...]
    variables: dict[str, str]


def parts() -> dict[str, Part]:
    """All of them, by name."""
    tests = ("-m", "pytest", "-m", "cuda", "-p", "no:randomly")
    return {
        "tests": Part("pytest, all that is marked cuda, without NCCL", (*tests, *cuda_files()), DESELECTED | FOUR),
        "gpu": Part("python -m tests.gpu, without NCCL", ("-m", "tests.gpu", "--steps", "20"), DESELECTED),
        "hazards": Part("of the tests, training in all ways; no two accesses to memory without an order",
                        (*tests, "tests/devices"), FOUR),
        "host": Part("python -m benchmarks.parts.host: the host's time for a step whose kernels take none",
                     ("-m", "benchmarks.parts.host"), {"SOFTCUDA_NUMBERS": "0", "SOFTCUDA_DEVICES": "8"}),
        "python": Part("the environment's Python, with arguments of your own", (), {}),
    }


def run(part: Part, python: Path, more: Sequence[str]) -> int:
    """Runs a part, with more arguments; its exit status."""
    words = [*part.command, *more]
    if words[:2] == ["-m", "pytest"]:
        words = covered.measuring(words)
    return subprocess.run([python, *words], cwd=ROOT, env=environment(part)).returncode


def environment(part: Part) -> dict[str, str]:
    """Its variables: this process's, the fake's, and those that the user has set by hand in place of these."""
    own = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    # Kernels of the CPU would start threads of OpenMP's in each of the package's.
    return {"OMP_NUM_THREADS": "1", **part.variables, **own}
