"""Which changes of the package no test sees: ``python -m tests.tools.mutants splitpipe/core/generator.py``."""
from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pytest

from .changes import Mutant, mutants, results
from .driver import Driver
from .explained import FILE, Explained, explained

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants", description=__doc__, epilog="Other options are pytest's."
    )
    parser.add_argument("files", nargs="+", help="of the package, relative to the repository")
    parser.add_argument("--out", type=Path, required=True, help="a file for results, which are not found again")
    parser.add_argument("--record", type=Path, required=True, help="a file for which test calls what; made if missing")
    parser.add_argument("--budgets", type=float, nargs="+", default=[3.0, 30.0], metavar="S", help="seconds of tests")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at a time")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the mutants, drawn at random")
    given, options = parser.parse_known_args()
    them = [mutant for file in given.files for mutant in mutants(ROOT, file)]
    given.out.touch()
    had = results(given.out.read_text())
    them = [mutant for mutant in them if mutant.name not in had]
    if given.sample:
        them = random.Random(0).sample(them, min(given.sample, len(them)))
    known = explained(FILE.read_text())
    with given.out.open("a") as out:

        def told(mutant: Mutant, answer: str | None) -> None:
            print(mutant.result(answer), file=out, flush=True)
            survived = Explained(mutant.file, mutant.function, mutant.before, mutant.after)
            if answer is None and survived not in known:
                print(mutant)

        options += ["-q", "-s", "-p", "no:randomly", "-p", "no:xdist", "--timeout", "0", "-o", "faulthandler_timeout=0"]
        driver = Driver(ROOT / "splitpipe", them, given.record, given.budgets, given.processes, told)
        return pytest.main([*options, "-m", "not compiles and not cuda"], plugins=[driver])


if __name__ == "__main__":
    sys.exit(main())
