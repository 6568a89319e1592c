"""Coverage of what runs in other processes."""
from __future__ import annotations

import os
import sys
import uuid

#: Where their coverage goes, a file each, if it is measured.
FOLDER = "SPLITPIPE_COVERAGE"


def python(*options: str) -> list[str]:
    """The command that runs a script or module in another process, to which its arguments are added.

    Args:
        options: of Python.
    """
    command = [sys.executable, *options]
    if os.environ.get(FOLDER):
        file = os.path.join(os.environ[FOLDER], f"{uuid.uuid4()}.json")
        command += ["-m", "slipcover", "--immediate", "--branch", "--source", "splitpipe", "--json", "--out", file]
    return command
