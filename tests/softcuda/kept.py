"""Folders that are made once, and are either whole or not there."""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock  # Which torch needs, too.


class Missing(RuntimeError):
    """This machine lacks something, which the text names."""


def default() -> Path:
    """Where this user's are: ``$XDG_CACHE_HOME/splitpipe/softcuda``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitpipe" / "softcuda"


def whole(folder: Path, fill: Callable[[Path], None], doing: str) -> Path:
    """The folder, filled now unless it was before, which people are told of.

    It gets its name when it is complete: one that was interrupted is begun again.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            print(f"{doing} ...", flush=True)
            room = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(room, ignore_errors=True)
            room.mkdir()
            fill(room)
            room.rename(folder)
    return folder
