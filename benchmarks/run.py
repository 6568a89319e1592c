"""One command for all results: runs every script of this folder that measures, then makes the pictures and the tables.

A part that fails or takes too long is reported with the end of what it said; the others still run, an older result of
it stays, and the exit code is 1.

Example:
    python benchmarks/run.py
    python benchmarks/run.py --only compute parts
    python benchmarks/run.py --device cuda --into gpu-results
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the scripts are modules of this folder's package

from benchmarks.harness import measure
from benchmarks.harness.measure import Row
from benchmarks.harness.runner import BENCHMARKS, Outcome, Part, Way, finish, in_turn, measured, sentence, short

RESULTS = BENCHMARKS / "results"

#: Minutes that all parts have together, on the CPU and on a CUDA device.
BUDGETS = {"cpu": 20.0, "cuda": 9.0}

#: Each part, in the order in which they run: here are the sizes, numbers of passes and times to change. The seconds
#: are about those that it takes on two quiet cores, or on one GPU; there is room in the budget for slower ones.
PARTS = (
    Part(
        "compute", "parts.compute",
        cpu=Way(
            "--models gpt resnet101 unet amoebanet --passes 3 --no-memory --contenders 'splitpipe, drop-in, split' "
            "'splitpipe, drop-in, autograd' 'splitpipe, 1f1b, autograd' 'splitpipe, zb-h1' 'splitpipe, zb-v' "
            "'torchgpipe, GPipe' 'torch.distributed, 1F1B' ZBV 'batch, 2 threads'", 280,
        ),
        cuda=Way(
            "--models gpt resnet101 unet amoebanet --preset large --passes 5 --contenders 'splitpipe, drop-in' "
            "'splitpipe, zb-h1' torchgpipe unwrapped", 100,
        ),
        quick="--models gpt --preset tiny --passes 1 --chunks 2 --contenders 'batch, 2'",
    ),
    Part(
        "memory-peers", "parts.memory",
        cpu=Way("--chunks 1 8 --passes 2", 110),
        cuda=Way("--preset large --chunks 8", 50),
        quick="--models gpt --preset tiny --chunks 2 --checkpoint never --schedules",
    ),
    Part(
        "checkpointing", "parts.checkpointing",
        cpu=Way("--passes 3 --no-memory", 80),
        cuda=Way("--preset large --passes 3", 60),
        quick="--models gpt --preset tiny --passes 1 --chunks 2",
    ),
    Part(
        "scaling", "parts.scaling",
        cpu=Way("--passes 3", 120),
        cuda=Way("--passes 5", 50),
        quick="--tables chunks --preset tiny --passes 1 --chunks 1 2",
    ),
    Part(
        "ablation", "parts.ablation",
        cpu=None,  # In virtual time it needs torch's CUDA build: python -m tests.softcuda python -- -m ...
        cuda=Way("--preset large --passes 7", 40),
        quick="--models chain --passes 1 --copies 0",
    ),
    Part(
        "overhead", "parts.overhead",
        cpu=Way("--passes 5 --gpt-passes 3", 45),
        cuda=Way("--passes 11", 15),
        quick="--passes 1 --stages 2 --chunks 2 --width 16 --blocks 2 --gpt-chunks 2 --gpt-passes 1 "
        "--compile aot_eager --ops 2",
    ),
    Part(
        "parts", "parts.one_device",
        cpu=Way("--threads 2 --passes 3 --schedules 1f1b zb-h1", 80),
        cuda=Way("--preset large --passes 5", 50),
        quick="--preset tiny --threads 1 --passes 1 --schedules 1f1b --chunks 2",
    ),
    Part(
        "planner", "parts.planner",
        cpu=Way("--passes 5 --seconds 15 --chunks 4 8", 75),
        cuda=Way("--models gpt --preset large --passes 3 --seconds 10 --chunks 8 16 --rivals 1", 35),
        quick="--models gpt --preset tiny --passes 1 --seconds 0 --chunks 2 --schedules 1f1b zb-h1 --rivals 1",
    ),
    Part(
        "step-mlp", "parts.backward step --models mlp",
        cpu=Way("--passes 5", 50),
        cuda=Way("--preset large --stages 4 --passes 7 --chunks 4 8 16", 20),
        quick="--preset tiny --passes 1 --chunks 2",
    ),
    Part(
        "step-gpt", "parts.backward step --models gpt",
        cpu=Way("--passes 3 --chunks 8", 40),
        cuda=Way("--preset large --stages 4 --passes 7 --chunks 4 8 16", 30),
        quick="--preset tiny --passes 1 --chunks 2",
    ),
    Part(
        "trace", "parts.backward trace",
        cpu=None,
        cuda=Way("--preset large --stages 4", 20),
        quick="--preset tiny",
    ),
    Part(
        "cost", "parts.backward cost",
        cpu=Way("--passes 11", 30),
        cuda=None,
        quick="--passes 1 --calls 3",
    ),
    Part(
        "memory", "parts.backward memory",
        cpu=Way("--passes 1 --models mlp", 45),
        cuda=Way("--preset large --stages 4 --passes 1", 30),
        quick="--preset tiny --passes 1 --models mlp",
    ),
    Part(
        "merge", "parts.backward merge",
        cpu=Way("--passes 5", 20),
        cuda=Way("--preset large", 20),
        quick="--preset tiny --passes 1 --chunks 2",
    ),
    Part(
        "convolutions", "parts.convolutions",
        cpu=Way("--threads 1 --passes 3 --sizes 1x64x8x3 1x256x2x3 1x512x4x3 4x64x16x3 2x64x32x3 4x256x8x3", 25),
        cuda=None,
        quick="--passes 1 --length 2 --chunks 2 --sizes 1x4x4x3",
    ),
    Part(
        "schedules", "parts.schedules",
        cpu=Way("--seconds 4", 72),
        cuda=None,
        quick="--only small --seconds 0.01",
    ),
    Part(
        "emulated", "parts.emulated",
        cpu=Way("--devices 4 --chunks 8 --passes 3 --host-passes 11", 115),
        cuda=None,
        quick="--ops 0.01 --devices 2 --chunks 3 --passes 1 --schedules 1f1b --bare --alone --sleeps 1 --host-ops 0 "
        "--host-passes 1 --host-chunks 2",
    ),
)


def chosen(names: Sequence[str], device: str) -> list[Part]:
    """The parts with these names, or all that run on the device.

    Raises:
        ValueError: there is no part of a name, or it does not run there.
    """
    there = {part.name: part for part in PARTS if part.way(device)}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ValueError(f"found part {', '.join(unknown)}; expected of those that run on {device}: {', '.join(there)}")
    return [part for name, part in there.items() if not names or name in names]


def listed(device: str) -> str:
    """A line for each part: its name, about how long it takes, and its command."""
    rows = [(part.name, way.seconds, shlex.join(part.words(device))) for part in PARTS if (way := part.way(device))]
    lines = [f"{name:16}{seconds:5.0f} s  {command}" for name, seconds, command in rows]
    return "\n".join([*lines, f"{'together':16}{sum(seconds for _, seconds, _ in rows):5.0f} s"])


def diary(parts: Sequence[Part], device: str, quick: bool, found: dict[str, Outcome]) -> list[Row]:
    """A line for each part: what ran, how long it took, and where the result is."""
    return [
        {
            "part": part.name,
            "command": f"`python -m benchmarks.{shlex.join(part.words(device, quick))}`",
            "seconds": round(found[part.name].seconds, 1),
            "result": f"`{part.result(device)}`" if found[part.name].fault is None else found[part.name].fault,
        }
        for part in parts
    ]


def closing(into: Path) -> dict[str, Outcome]:
    """Makes the pictures of a folder of results, and the tables in the pages of the repository if it is theirs."""
    found: dict[str, Outcome] = {}
    if find_spec("matplotlib") is None:
        print("pictures: left out, they need matplotlib: python -m pip install -e '.[bench]' -c constraints.txt")
    else:
        found["pictures"] = finish(["report.figures", "--results", str(into)], 120)
    if into == RESULTS:
        found["pages"] = finish(["report"], 60)
    for name, outcome in found.items():
        print(f"{name}: {sentence(outcome)}", flush=True)
    return found


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        "run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(BUDGETS), default="cpu", help="where (cpu)")
    parser.add_argument("--into", metavar="FOLDER", help="where the results go (those of the CPU: benchmarks/results)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts (all)")
    parser.add_argument("--budget", type=float, metavar="MINUTES",
                        help="for all that runs (20; on a CUDA device 9)")
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
    environment = {**measure.environment(), "command": asked}
    budget = 60 * (options.budget or BUDGETS[options.device])
    began = time.perf_counter()
    found = in_turn(parts, options.device, budget, lambda part, limit: measured(
        part, into, options.device, options.quick, limit, asked
    ))
    took = time.perf_counter() - began
    if parts == chosen([], options.device):
        tables = {"parts": diary(parts, options.device, options.quick, found), "all": [{"minutes": took / 60}]}
        new = into / f".run-{options.device}.json.new"
        measure.save(str(new), environment, tables)
        new.replace(into / f"run-{options.device}.json")
    failed = [name for name, outcome in {**found, **closing(into)}.items() if outcome.fault is not None]
    print(f"{len(parts)} parts in {took / 60:.1f} minutes into {short(into)}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    # As an interrupt does, so that the part that runs ends, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
