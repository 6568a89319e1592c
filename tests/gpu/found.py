"""What this machine has: devices, who reaches whom, and the versions of what drives them."""
from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from typing import Any

#: Packages that parts ask for, beside torch.
PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "numpy", "torchgpipe")
#: Kinds of devices that the checks know, and that have streams.
KINDS = ("cuda", "xpu")


def found() -> dict[str, Any]:
    """All of it, as JSON knows it. In a process of its own: whoever asks a GPU has a context there."""
    import torch

    told: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES}, "kind": None, "devices": [], "peers": [],
    }
    its = torch.accelerator.current_accelerator(check_available=True)
    if its is None or its.type not in KINDS:
        return told
    told["kind"] = its.type
    module = torch.get_device_module(its.type)
    count = module.device_count()
    for index in range(count):
        properties = module.get_device_properties(index)
        told["devices"].append({
            "name": properties.name, "GiB": round(properties.total_memory / 2**30, 1),
            "free GiB": round(module.mem_get_info(index)[0] / 2**30, 1),
            "processors": getattr(properties, "multi_processor_count", None),
            "capability": ".".join(map(str, module.get_device_capability(index))) if its.type == "cuda" else None,
            "TFLOP/s": rate(torch.device(its.type, index)),
        })
    if its.type == "cuda":
        told["peers"] = [
            [int(one == other or torch.cuda.can_device_access_peer(one, other)) for other in range(count)]
            for one in range(count)
        ]
        told |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "driver": _driver()}
        told["cudnn"] = torch.backends.cudnn.version()
    return told


def rate(device: Any) -> float:
    """TFLOP/s of a device in products of matrices of 1024, which tell a GPU from a CPU behind its interface."""
    import torch

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    one, taken = torch.ones(1024, 1024, device=device), []
    for _ in range(4):
        wait()
        begun = time.perf_counter()
        one @ one
        wait()
        taken.append(time.perf_counter() - begun)
    return 2 * 1024**3 / min(taken) / 1e12


def version(name: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=60,
        check=False,
    )
    return done.stdout.split("\n")[0].strip() or None


def lines(told: dict[str, Any]) -> list[str]:
    """What it has found, for people."""
    said = [f"python {told['python']}, torch {told['torch']}, {told['system']}"]
    said += [f"{key} {told[key]}" for key in ("driver", "cuda", "rocm", "cudnn") if told.get(key)]
    for index, its in enumerate(told["devices"]):
        more = "".join(f", {key} {its[key]}" for key in ("processors", "capability") if its[key])
        more += f", {its['TFLOP/s']:.3g} TFLOP/s in products of 1024"
        said.append(f"{told['kind']}:{index}: {its['name']}, {its['GiB']} GiB, {its['free GiB']} of them free{more}")
    if len(told["peers"]) > 1:
        said.append("peer access, a row a device:")
        said += ["  " + " ".join(map(str, row)) for row in told["peers"]]
    said += [f"{name} is not installed" for name, version in told["packages"].items() if version is None]
    return said
