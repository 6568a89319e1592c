"""A virtual environment with torch's CUDA build on the fake runtime, and with this checkout."""
from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .kept import Missing, whole
from .wheel import CONSTRAINTS, ROOT, constrained


def ready(torch: Path, cache: Path, extras: Sequence[str]) -> Path:
    """The environment's folder, made now unless it was before. Torch can't be imported before ``use``.

    There is one for each torch (the package's folder), Python, checkout, constraints.txt, setup.cfg and set of extras.
    """
    what = f".[{','.join(extras)}]"
    # Not this process's own environment, which may be gone tomorrow.
    key = hashlib.sha256(f"{torch} {sys.base_prefix} {sys.version} {ROOT} {what}".encode())
    for file in (CONSTRAINTS, ROOT / "setup.cfg"):
        key.update(file.read_bytes())
    folder = cache / f"environment-{torch.parent.name}-{key.hexdigest()[:12]}"
    return whole(folder, lambda room: _make(room, torch, what), f"installs {what}")


def use(folder: Path, libraries: Path) -> Path:
    """Has an environment load these libraries, which may be of other sources than those before; its Python."""
    line = f"import sys; sys.path.append({str(libraries)!r}); import softcuda\n"
    pth = _site(folder) / "softcuda.pth"
    if not pth.exists() or pth.read_text() != line:
        pth.write_text(line)
    return folder / "bin/python"


def _site(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def _make(room: Path, torch: Path, what: str) -> None:
    """Installs the checkout with its extras. pip finds torch, and gets what else that needs."""
    # Without pip, which Debian's Python can't put in; this process's own does the work.
    _run([sys.executable, "-m", "venv", "--without-pip", str(room)], "makes no virtual environment")
    (_site(room) / "torch.pth").write_text(f"{torch.parent}\n")
    version, constraints = torch.parent.name.split("-")[1], room / "constraints.txt"
    # What another torch asks for may be another version than the constraints'.
    lines = CONSTRAINTS.read_text(encoding="utf-8") if version == constrained() else f"torch=={version}\n"
    constraints.write_text(lines, encoding="utf-8")
    _run([sys.executable, "-m", "pip", "--python", str(room / "bin/python"), "install", "--quiet", "--no-compile",
          "-e", what, "-c", str(constraints)], f"can't install {what}")


def _run(command: Sequence[str], what: str) -> None:
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise Missing(
            f"{command[0]} {what} (exit status {code}; its own words are above): expected packages from an index. The "
            f"command was: {' '.join(command)}"
        )
