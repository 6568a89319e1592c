"""Builds the shared library of the simulated accelerator, once for each torch, compiler and source."""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Not on this system: two processes may build it at once, each for itself.
    fcntl = None  # type: ignore[assignment]

HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent


class NoCompiler(RuntimeError):
    """This machine has no C++ compiler."""


def library() -> Path:
    """The library, built now unless it was before.

    It is kept in ``$XDG_CACHE_HOME/splitpipe-simdev``, by default under ``~/.cache``.

    Raises:
        NoCompiler: neither ``$CXX`` nor g++ is there.
        RuntimeError: the compiler's errors.
    """
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise NoCompiler(
            f"found no {name}: expected a C++ compiler to build the simulated accelerator with. Install g++ (with "
            "apt-get install g++, say), or name another one in the environment variable CXX."
        )
    sources = sorted(HERE.glob("*.cpp"))
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}",
    ]
    links = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    key = hashlib.sha256("\n".join([torch.__version__, _version(compiler), *flags, *links]).encode())
    for file in sorted([*sources, *HERE.glob("*.h")]):
        key.update(file.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitpipe-simdev"
    built = folder / f"{key.hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder), tempfile.TemporaryDirectory(dir=folder) as room:
            if not built.exists():  # Else another process has built it meanwhile.
                made = Path(room) / built.name
                # All in one: what takes time is to read torch's headers.
                text = "".join(f'#include "{source}"\n' for source in sources)
                done = subprocess.run([compiler, *flags, "-x", "c++", "-", "-o", str(made), *links],
                                      input=text, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"the simulated accelerator does not compile with {compiler}:\n{done.stderr}")
                made.replace(built)  # Whole or not at all: this process may be stopped before.
    return built


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time. The system gives the lock back of one that ends."""
    if fcntl is None:
        yield
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
