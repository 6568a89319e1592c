"""What ``python -m tests.simdev`` finds, for tests. A process that has simulated devices has them for good."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.covered import environment, python

ROOT = Path(__file__).resolve().parents[1]


def told(*arguments: str) -> dict[str, Any]:
    """What it prints; skips the test where nothing builds the simulated accelerator."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs g++, or another C++ compiler named in CXX")
    ran = subprocess.run(
        [*python("-W", "ignore"), "-m", "tests.simdev", *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False, env=environment(OMP_NUM_THREADS="1"),
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
