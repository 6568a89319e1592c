"""Survivors of the tests, on four devices of the fake CUDA runtime.

    SOFTCUDA_HAZARDS=2 SOFTCUDA_LAG=1000 SOFTCUDA_DEVICES=4 \\
        python -m tests.softcuda python -- -m tests.tools.mutants.devices RESULTS --out FILE
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.devices import cases, makespans, sites

from .changes import Mutant, mutants, results
from .children import tried
from .replacing import Functions

ROOT = Path(__file__).resolve().parents[3]
#: Seconds for all cases.
LIMIT = 300.0


def _cases(every: int) -> list[cases.Case]:
    return [*sites.few(*cases.PATHS)][::every] + [*cases.layers()][::4 * every + 1] + [*cases.cast()][::every]


def _seen(them: list[cases.Case]) -> str | None:
    for case in them:
        found = cases.run(case)
        if found.hazards or found.faults:
            return f"{case}: {[*found.hazards, *found.faults][0]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants.devices", description=__doc__)
    parser.add_argument("results", type=Path, help="of python -m tests.tools.mutants")
    parser.add_argument("--out", type=Path, required=True, help="a file for results, a line of JSON each")
    parser.add_argument("--every", type=int, default=2, metavar="N", help="one case in so many")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at a time")
    given = parser.parse_args()
    functions, them = Functions(f"{ROOT / 'splitpipe'}/"), _cases(given.every)
    left = {name for name, killed in results(given.results.read_text()).items() if killed is None}
    chosen = [one for file in sorted({name[0] for name in left}) for one in mutants(ROOT, file) if one.name in left]
    print(f"{len(chosen)} survivors, {len(them)} cases")

    def times(_: object) -> dict[str, float]:
        return {str(way): max(way.taken()) for way in makespans.CHECKED}

    (_, before), = tried(times, [None], lambda _: LIMIT, 1)

    def attempt(mutant: Mutant) -> str | None:
        functions.replace((mutant.file.partition("/")[2], mutant.function), mutant.code)
        found = _seen(them)
        if found is None and any(time > before[way] for way, time in times(None).items()):
            found = "a step takes longer"
        return found

    with given.out.open("a") as out:
        for mutant, answer in tried(attempt, chosen, lambda _: LIMIT, given.processes):
            print(mutant.result(answer), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
