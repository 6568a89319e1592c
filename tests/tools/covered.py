"""Coverage of branches, also of what runs in other processes: ``python -m tests.tools.covered -n 2``.

Only the package is measured. Tests of compiled layers run apart (``-m compiles``): the compiler can't see through code
that is measured.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The environment variable that names the folder for it, a file a process, if coverage is measured.
FOLDER = "SPLITPIPE_COVERAGE"
#: Percent of branches.
LEAST = 97


def _file() -> str | None:
    folder = os.environ.get(FOLDER)
    return os.path.join(folder, f"{uuid.uuid4()}.json") if folder else None


def environment(**more: str) -> dict[str, str]:
    """This process's environment for that command, without what slipcover has for its own: they would end it.

    Args:
        more: variables.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("SLIPCOVER_")} | more


@contextmanager
def measured() -> Iterator[None]:
    """Measures what of the package is imported inside the block, in a process that a test has started."""
    file = _file()
    if file is None:
        yield
        return
    import slipcover  # Who measures nothing need not have it.

    measuring = slipcover.Slipcover(immediate=True, branch=True, source=["splitpipe"])
    try:
        with slipcover.ImportManager(measuring, slipcover.FileMatcher(sources=["splitpipe"])):
            yield
    finally:
        measuring.source = None  # Of files that it has not imported, others know what there is to take.
        with open(file, "w") as out:
            json.dump(measuring.get_coverage(), out)


def main() -> int:
    """Runs all tests with the arguments that pytest is given, measures branches, and says which none took."""
    import slipcover

    with tempfile.TemporaryDirectory() as folder:
        own = os.path.join(folder, "own.json")
        measure = ["-m", "slipcover", "--immediate", "--branch", "--source", "splitpipe", "--json", "--out", own]
        done = subprocess.run(
            [sys.executable, *measure, "-m", "pytest", "-m", "not compiles", *sys.argv[1:]],
            env={"OMP_NUM_THREADS": "1", **os.environ, FOLDER: folder}, check=False,
        )
        if done.returncode:
            return done.returncode
        found = json.loads(Path(own).read_text())
        for other in Path(folder).glob("*.json"):
            if other.name != "own.json":
                slipcover.merge_coverage(found, json.loads(other.read_text()))
    files = found["files"].items()
    for name, file in files:
        if file["missing_branches"]:
            print(name, *(f"{start}->{end or 'exit'}" for start, end in file["missing_branches"]))
    taken = sum(len(file["executed_branches"]) for _, file in files)
    missing = sum(len(file["missing_branches"]) for _, file in files)
    percent = 100 * taken / (taken + missing)
    print(f"{taken} of {taken + missing} branches, {percent:.1f} %")
    if percent < LEAST:
        print(f"expected {LEAST} % at least: write a test that takes some of those above.")
    return int(percent < LEAST)


if __name__ == "__main__":
    sys.exit(main())
