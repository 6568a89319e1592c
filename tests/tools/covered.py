"""Coverage of branches, also of what runs in other processes: ``python -m tests.tools.covered -n 2``.

Only the package is measured. With a folder named in SPLITPIPE_COVERAGE this command and ``python -m tests.softcuda
tests`` leave there which branches their tests took; ``python -m tests.tools.covered --count`` counts them. Tests of
compiled layers run apart (``-m compiles``): the compiler can't see through code that is measured.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The environment variable that names a folder, with a file of each process that was measured.
FOLDER = "SPLITPIPE_COVERAGE"
#: Percent of branches.
LEAST = 97


def _file(folder: str | None) -> str | None:
    folder = folder or os.environ.get(FOLDER)
    return os.path.join(folder, f"{uuid.uuid4()}.json") if folder else None


def environment(**more: str) -> dict[str, str]:
    """This process's environment for that command, without what slipcover has for its own: they would end it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLIPCOVER_")} | more


@contextmanager
def measured() -> Iterator[None]:
    """Measures what of the package is imported inside the block, in a process that a test has started."""
    file = _file(None)
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


def measuring(words: Sequence[str], folder: str | None = None) -> list[str]:
    """Arguments of Python for a run of pytest, measured if there is a folder for that, or one is named."""
    file = _file(folder)
    if file is None:
        return [*words]
    what = ["--branch", "--source", "splitpipe"]
    return ["-m", "slipcover", "--immediate", *what, "--json", "--out", file, *words]


def main() -> int:
    """Runs all tests with the arguments that pytest is given, measures branches, and says which none took.

    With a folder named it says nothing, and leaves what it has measured there; ``--count`` says what all took that are
    there, and runs nothing.
    """
    named = os.environ.get(FOLDER)
    if sys.argv[1:] == ["--count"]:
        return counted(Path(named or "."))
    with tempfile.TemporaryDirectory() as room:
        folder = named or room
        words = ["-m", "pytest", "-m", "not compiles", *sys.argv[1:]]
        code = subprocess.run([sys.executable, *measuring(words, folder)],
                              env={"OMP_NUM_THREADS": "1", **os.environ, FOLDER: folder}, check=False).returncode
        return code if code or named else counted(Path(folder))


def counted(folder: Path) -> int:
    """Says which branches no process took whose file is in the folder; 1 if they are too many."""
    import slipcover

    measured = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    if not measured:
        print(f"found no file in {folder.absolute()}: expected {FOLDER} to name a folder where tests were measured")
        return 2
    found = max(measured, key=lambda its: len(its["files"]))  # It has the files that are not imported, too.
    for other in measured:
        if other is not found:
            slipcover.merge_coverage(found, other)
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
