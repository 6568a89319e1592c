"""Tests with one mutant in place: ``python -m tests.tools.mutants.one FILE:LINE BEFORE AFTER [options of pytest]``."""
from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from .changes import Mutant, mutants
from .replacing import Functions

ROOT = Path(__file__).resolve().parents[3]


class _InPlace:
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def pytest_collection_finish(self) -> None:
        import_module(self._mutant.file.removesuffix(".py").replace("/", "."))
        key = self._mutant.file.partition("/")[2], self._mutant.function
        Functions(f"{ROOT / 'splitpipe'}/").replace(key, self._mutant.code)


def main() -> int:
    if len(sys.argv) < 4:
        print(__doc__)
        return 2
    place, before, after, *options = sys.argv[1:]
    file, _, line = place.partition(":")
    found = [one for one in mutants(ROOT, file, int(line)) if (one.before, one.after) == (before, after)]
    if not found:
        print(f"{file} has no mutant at line {line} from {before} to {after}: "
              "expected one that tests.tools.mutants names")
        return 2
    return pytest.main(options, plugins=[_InPlace(found[0])])


if __name__ == "__main__":
    sys.exit(main())
