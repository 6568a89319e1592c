"""Torch's CUDA build: its wheel, fetched with pip and unpacked, without NVIDIA's libraries."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from .kept import Missing, whole

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
NAME = re.compile(r"torch-(?P<version>[^-+]+)(\+[^-]+)?-(?P<tag>cp\d+)-.*linux.*_x86_64\.whl")


def constrained() -> str:
    """The version of torch that constraints.txt names."""
    found = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found is None:
        raise Missing(f"found no line torch==VERSION in {CONSTRAINTS}: expected one, or name a version by --torch")
    return found[1]


def unpacked(version: str, cache: Path, given: Path | None = None) -> Path:
    """The folder of the package torch, fetched, unless a wheel is given, and unpacked now unless it was before."""
    def fill(room: Path) -> None:
        wheel = given or fetch(version, room)
        unpack(wheel, version, room)
        if given is None:
            wheel.unlink()

    doing = f"fetches the CUDA build of torch {version}, some 530 MB" if given is None else f"unpacks {given.name}"
    return whole(cache / f"torch-{version}-{TAG}", fill, f"{doing} (1.1 GB when unpacked)") / "torch"


def fetch(version: str, room: Path) -> Path:
    """Has pip download the wheel, as the user has configured it."""
    # Three: exactly this text, and no +cpu behind it. Without pip's cache, which would have the half GB once more.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:",
               "--dest", str(room), f"torch==={version}"]
    # Newer ones take up a download where its connection was lost.
    code = subprocess.run(command, env={"PIP_RESUME_RETRIES": "10", **os.environ}).returncode
    if code or not (wheels := [*room.glob("*.whl")]):
        raise Missing(
            f"pip could not fetch torch {version} (exit status {code}; its own words are above): expected a package "
            f"index with the CUDA build for Python {TAG[2]}.{TAG[3:]} on Linux x86-64. Connect this machine to one, or "
            f"give a wheel that is already there by --wheel. The command was: {' '.join(command)}"
        )
    return wheels[0]


def unpack(wheel: Path, version: str, room: Path) -> None:
    """Unpacks a wheel of that version, and takes NVIDIA's libraries and Triton out of what it says that it needs."""
    found = NAME.fullmatch(wheel.name)
    if found is None or (found["version"], found["tag"]) != (version, TAG):
        raise Missing(f"found {wheel.name}: expected a wheel of torch {version}, {TAG}, for Linux x86-64")
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(room)
    except (OSError, zipfile.BadZipFile) as error:
        raise Missing(f"{wheel} can't be unpacked: {error}. Expected a whole wheel: fetch it again") from error
    if not (room / "torch/lib/libtorch_cuda.so").exists():
        raise Missing(f"{wheel.name} has no libtorch_cuda.so: expected torch's CUDA build, as on pypi.org")
    # Without packages that it needs on Linux alone: the fake has them, or nothing uses them.
    for file in room.glob("torch-*.dist-info/METADATA"):
        text = file.read_text(encoding="utf-8")
        text = re.sub(r'^Requires-Dist: .*platform_system == "Linux".*\n', "", text, flags=re.MULTILINE)
        file.write_text(text, encoding="utf-8")
