"""One command for all results: runs every script of this folder that measures, then makes the pictures and the tables.

A part that fails or takes too long is reported with the end of what it said; the others still run, an older result of
it stays, and the exit code is 1.

Example:
    python benchmarks/run.py
    python benchmarks/run.py --only compute losses
    python benchmarks/run.py --device cuda --into gpu-results
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the scripts are modules of this folder's package

from benchmarks.harness.runner import BENCHMARKS, Outcome, Part, Setting, finish, measured, sentence, short

RESULTS = BENCHMARKS / "results"

#: Each part, in the order in which they run: here are the sizes, numbers of passes and times to change. The seconds
#: are about those that it takes on two quiet cores, or on one GPU.
PARTS = (
    Part(
        "compute", "parts.compute",
        cpu=Setting(
            "--models gpt resnet101 unet amoebanet --passes 3 --contenders 'splitpipe, drop-in, split' "
            "'splitpipe, drop-in, autograd' 'splitpipe, 1f1b, autograd' 'splitpipe, zb-h1' 'splitpipe, zb-v' "
            "'torchgpipe, GPipe' 'torch.distributed, 1F1B' ZBV 'batch, 2 threads'", 280,
        ),
        cuda=Setting(
            "--models gpt resnet101 unet amoebanet --preset large --passes 5 --contenders 'splitpipe, drop-in' "
            "'splitpipe, zb-h1' torchgpipe unwrapped", 100,
        ),
        quick="--models gpt --preset tiny --passes 1 --chunks 2 --contenders 'splitpipe, 1f1b' 'batch, 2'",
    ),
    Part(
        "memory-peers", "parts.memory",
        cpu=None,  # There, all stages have one memory.
        cuda=Setting("--preset large --chunks 8", 50),
        quick="--models gpt --preset tiny --chunks 2 --checkpoint never --schedules",
    ),
    Part(
        "checkpointing", "parts.checkpointing",
        cpu=Setting("--passes 3", 80),
        cuda=Setting("--preset large --passes 3", 60),
        quick="--models gpt --preset tiny --passes 1 --chunks 2",
    ),
    Part(
        "scaling", "parts.scaling",
        cpu=Setting("--passes 3", 60),
        cuda=Setting("--preset large --passes 5", 50),
        quick="--preset tiny --passes 1 --chunks 1 2",
    ),
    Part(
        "losses", "parts.losses",
        cpu=Setting("--passes 31", 15),
        cuda=Setting("--passes 31", 15),
        quick="--passes 1 --chunks 2",
    ),
    Part(
        "planner", "parts.planner",
        cpu=Setting("--passes 5 --seconds 15 --chunks 4 8", 75),
        cuda=Setting("--models gpt --preset large --passes 3 --seconds 10 --chunks 8 16 --rivals 1", 35),
        quick="--models gpt --preset tiny --passes 1 --seconds 0 --chunks 2 --schedules 1f1b zb-h1 --rivals 1",
    ),
    Part(
        "schedules", "parts.schedules",
        cpu=Setting("--seconds 4", 72),
        cuda=None,
        quick="--only small --seconds 0.01",
    ),
)


def chosen(names: Sequence[str], device: str) -> list[Part]:
    """The parts with these names, or all that run on the device.

    Raises:
        ValueError: there is no part of a name, or it does not run there.
    """
    there = {part.name: part for part in PARTS if part.setting(device)}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ValueError(f"found part {', '.join(unknown)}; expected of those that run on {device}: {', '.join(there)}")
    return [part for name, part in there.items() if not names or name in names]


def listed(device: str) -> str:
    """A line for each part: its name, about how long it takes, and its command."""
    settings = {part: setting for part in PARTS if (setting := part.setting(device))}
    lines = [f"{part.name:16}{its.seconds:5.0f} s  {shlex.join(part.words(device))}" for part, its in settings.items()]
    return "\n".join([*lines, f"{'together':16}{sum(its.seconds for its in settings.values()):5.0f} s"])


def closing(into: Path) -> dict[str, Outcome]:
    """Makes the pictures of a folder of results, and the tables in the pages of the repository if it is theirs."""
    outcomes: dict[str, Outcome] = {}
    if find_spec("matplotlib") is None:
        print("pictures: left out, they need matplotlib: python -m pip install -e '.[bench]' -c constraints.txt")
    else:
        outcomes["pictures"] = finish(["report.figures", "--results", str(into)], 120)
    if into == RESULTS:
        outcomes["pages"] = finish(["report"], 60)
    for name, outcome in outcomes.items():
        print(f"{name}: {sentence(outcome)}", flush=True)
    return outcomes


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        "run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    parser.add_argument("--into", metavar="FOLDER", help="where the results go (those of the CPU: benchmarks/results)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts (all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs, and measures nothing")
    parser.add_argument("--list", action="store_true", help="print the parts, about how long they take, and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line; the exit code, 1 if a part failed."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        print(listed(options.device))
        return 0
    try:
        parts = chosen(options.only, options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.into is None and (options.quick or options.device != "cpu"):
        parser.error("found no --into; expected a folder, since benchmarks/results is for whole results of the CPU")
    into = Path(options.into).resolve() if options.into else RESULTS
    into.mkdir(parents=True, exist_ok=True)

    asked = shlex.join(["python", "benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
    outcomes: dict[str, Outcome] = {}
    for number, part in enumerate(parts, 1):
        print(f"[{number}/{len(parts)}] {part.name}: ", end="", flush=True)
        outcomes[part.name] = measured(part, into, options.device, options.quick, asked)
        print(sentence(outcomes[part.name]), flush=True)
    minutes = sum(outcome.seconds for outcome in outcomes.values()) / 60
    failed = [name for name, outcome in {**outcomes, **closing(into)}.items() if outcome.fault is not None]
    print(f"{len(parts)} parts in {minutes:.1f} minutes into {short(into)}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    # As an interrupt does, so that the part that runs ends, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
