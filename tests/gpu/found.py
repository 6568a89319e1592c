"""What this machine has: GPUs, who reaches whom, and the versions of what drives them."""
from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from contextlib import suppress
from typing import Any

import torch

from .parts import NEEDED

#: Packages that parts ask for, beside torch.
PACKAGES = (*NEEDED, "torchgpipe")


def found() -> dict[str, Any]:
    """All of it, as JSON knows it. In a process of its own: whoever asks a GPU has a context there."""
    count = torch.cuda.device_count()
    told: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(),
        "cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": _driver(),
        "packages": dict.fromkeys(PACKAGES), "devices": [],
        "peers": [[int(one == other or torch.cuda.can_device_access_peer(one, other)) for other in range(count)]
                  for one in range(count)],
    }
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            told["packages"][name] = importlib.metadata.version(name)
    for index in range(count):
        its = torch.cuda.get_device_properties(index)
        told["devices"].append({
            "name": its.name, "GiB": round(its.total_memory / 2**30, 1),
            "free GiB": round(torch.cuda.mem_get_info(index)[0] / 2**30, 1), "processors": its.multi_processor_count,
            "capability": f"{its.major}.{its.minor}", "TFLOP/s": rate(torch.device("cuda", index)),
        })
    return told


def rate(device: torch.device) -> float:
    """TFLOP/s of a device in products of matrices of 1024, which tell a GPU from a CPU behind its interface."""
    one, taken = torch.ones(1024, 1024, device=device), []
    for _ in range(4):
        begun = time.perf_counter()
        (one @ one)[0, 0].item()  # Which waits for it.
        taken.append(time.perf_counter() - begun)
    return 2 * 1024**3 / min(taken) / 1e12


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split("\n")[0].strip() or None
