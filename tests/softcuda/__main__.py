"""Runs the package on torch's CUDA build, on a machine without a GPU.

    python -m tests.softcuda tests
    python -m tests.softcuda hazards gpu
    python -m tests.softcuda tests -- -k stream

The first time it fetches torch's CUDA wheel (some 530 MB, which get 1.1 GB) with pip, builds a fake CUDA runtime with
g++ (a minute) and makes a virtual environment; all of it stays in a cache folder. It needs Linux on x86-64, Python with
pip, g++ and nm. Without a part it does this alone, and says where the environment's Python is.
"""
from __future__ import annotations

import argparse
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import environment, kept, libraries, wheel
from .kept import Missing
from .parts import parts, run


def main() -> int:
    """Makes what is missing and runs the parts; the exit status: 1 if one fails, 2 if there is nothing to run it on."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        prog="python -m tests.softcuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {name:10}{part.about}" for name, part in parts().items()),
        usage="%(prog)s [options] [PART ...] [-- ARGUMENT ...]",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="what to run, see below")
    parser.add_argument("--torch", metavar="VERSION", help="of torch, as in 2.15.0 (default: constraints.txt's)")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=kept.default(), help="(default: %(default)s)")
    given, more = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1:]
    if unknown := {*given.parts} - {*parts()}:
        parser.error(f"found {', '.join(sorted(unknown))}: expected one of {', '.join(parts())}")
    if more and len(given.parts) != 1:
        parser.error(f"found {len(given.parts)} parts and arguments behind --: expected one part, which gets them")
    try:
        python = ready(given.torch or wheel.constrained(), given.cache.absolute())
    except Missing as error:
        print(f"wrong: {error}", file=sys.stderr)
        return 2
    if not given.parts:
        print(python)
    codes = []
    for name in given.parts:
        print(f"\n== {name}: {parts()[name].about}", flush=True)
        codes.append(run(parts()[name], python, more))
        print(f"== {name}: exit status {codes[-1]}", flush=True)
    return int(any(codes))


def ready(version: str, cache: Path) -> Path:
    """The environment's Python, when all is there."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Missing(f"found {platform.system()} on {platform.machine()}: expected Linux on x86_64, as torch has the "
                      "CUDA build for")
    libraries.tools()  # Before half a GB is fetched.
    torch = wheel.unpacked(version, cache)
    with ThreadPoolExecutor(1) as pool:  # One computes, the other loads.
        built = pool.submit(libraries.built, torch, cache)
        return environment.use(environment.ready(torch, cache), built.result())


if __name__ == "__main__":
    sys.exit(main())
