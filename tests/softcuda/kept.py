"""Folders that are made once, and are either whole or not there."""
from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Missing(RuntimeError):
    """This machine lacks something, which the text names."""


def default() -> Path:
    """Where this user's are: ``$XDG_CACHE_HOME/splitpipe/softcuda``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitpipe" / "softcuda"


def whole(folder: Path, fill: Callable[[Path], None], doing: str) -> Path:
    """The folder, filled now unless it was before, which people are told of.

    It gets its name when it is complete: one that was interrupted is begun again.
    """
    if not folder.exists():
        with alone(folder):
            for left in folder.parent.glob(f"{folder.name}-*.part"):  # Of one that was killed: the lock is this one's.
                shutil.rmtree(left, ignore_errors=True)
            if not folder.exists():  # Else another process has made it meanwhile.
                _made(folder, fill, doing)
    return folder


def _made(folder: Path, fill: Callable[[Path], None], doing: str) -> None:
    print(f"{doing} ...", flush=True)
    begun = time.monotonic()
    room = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", suffix=".part", dir=folder.parent))
    try:
        fill(room)
        room.chmod(0o755)
        room.rename(folder)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    size = sum(file.lstat().st_size for file in folder.rglob("*"))
    print(f"{doing}: {time.monotonic() - begun:.0f} s, {size / 1e6:.0f} MB in {folder}", flush=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time makes that folder. The system gives the lock back of one that ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
