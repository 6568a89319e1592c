"""Runs the package on torch's CUDA build, on a machine without a GPU.

    python -m tests.softcuda tests
    python -m tests.softcuda hazards readme
    python -m tests.softcuda tests -- -k stream

The first time it fetches torch's CUDA wheel (some 530 MB, which get 1.1 GB) with pip, builds a fake CUDA runtime with
g++ (a minute) and makes a virtual environment; all of it stays in a cache folder. It needs Linux on x86-64, Python with
pip, g++ and nm. Without a part it does this alone, and says where the environment's Python is.
"""
from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import environment, kept, libraries, wheel
from .kept import Missing
from .parts import parts, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes what is missing and runs the parts; the exit status: 1 if one fails, 2 if there is nothing to run it on."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    at = words.index("--") if "--" in words else len(words)
    given, more = parser().parse_args(words[:at]), words[at + 1:]
    if more and len(given.parts) != 1:
        parser().error(f"found {len(given.parts)} parts and arguments behind --: expected one part, which gets them")
    them = {name: parts()[name] for name in dict.fromkeys(given.parts)}
    try:
        python = ready(given, sorted({"test", *(extra for part in them.values() for extra in part.extras)}))
    except Missing as error:
        print(f"wrong: {error}", file=sys.stderr)
        return 2
    codes = {}
    for name, part in them.items():
        print(f"\n== {name}: {part.about}", flush=True)
        begun = time.monotonic()
        codes[name] = run(part, python, more)
        print(f"== {name}: exit status {codes[name]}, {time.monotonic() - begun:.0f} s", flush=True)
    if not them:
        print(python)
    return int(any(codes.values()))


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        prog="python -m tests.softcuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {name:10}{part.about}" for name, part in parts().items()),
        usage="%(prog)s [options] [PART ...] [-- ARGUMENT ...]",
    )
    made.add_argument("parts", nargs="*", type=_part, metavar="PART", help="what to run, see below")
    made.add_argument("--torch", metavar="VERSION", help="of torch, as in 2.15.0 (default: constraints.txt's)")
    made.add_argument("--wheel", type=Path, metavar="FILE", help="torch's CUDA wheel, if it is there already")
    made.add_argument("--cache", type=Path, metavar="DIR", default=kept.default(), help="(default: %(default)s)")
    return made


def _part(name: str) -> str:
    if name not in parts():
        raise argparse.ArgumentTypeError(f"found {name}: expected one of {', '.join(parts())}")
    return name


def ready(given: argparse.Namespace, extras: Sequence[str]) -> Path:
    """The environment's Python, when all is there."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Missing(f"found {platform.system()} on {platform.machine()}: expected Linux on x86_64, as torch has the "
                      "CUDA build for")
    cache = given.cache.absolute()
    libraries.tools()  # Before half a GB is fetched.
    torch = wheel.unpacked(given.torch or wheel.constrained(), cache, given.wheel)
    with ThreadPoolExecutor(1) as pool:  # One computes, the other loads.
        built = pool.submit(libraries.built, torch, cache)
        folder = environment.ready(torch, cache, extras)
        return environment.use(folder, built.result())


if __name__ == "__main__":
    sys.exit(main())
