"""The findings of ``python -m tests.simdev``, for tests. A process that has simulated devices keeps them."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.covered import FOLDER, environment

ROOT = Path(__file__).resolve().parents[2]
#: Warnings are errors, but for one that mkldnn.flags gives on every CPU, and one of torch.compile's, of what it traces.
WARNINGS = (
    "-W", "error", "-W", "ignore:TF32 acceleration on top of oneDNN", "-W", "ignore:The .grad attribute of a Tensor"
)
#: Commands whose branches are not measured, as to begin to takes seconds: the others' and the tests' own are.
UNMEASURED = ("few", "layers", "paths", "places")


def told(*arguments: str) -> dict[str, Any]:
    """Runs ``tests.simdev`` and gives what it printed; skips the test if there is no C++ compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs g++, or another C++ compiler named in CXX")
    more = {FOLDER: ""} if arguments[0] in UNMEASURED else {}
    ran = subprocess.run(
        [sys.executable, *WARNINGS, "-m", "tests.simdev", *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False, env=environment(OMP_NUM_THREADS="1", **more),
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
