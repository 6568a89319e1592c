"""Step time against the number of microbatches, on real compute, and of stages, on emulated devices.

Example:
    python -m benchmarks.parts.scaling --save benchmarks/results/scaling-cpu.json
    python -m benchmarks.parts.scaling --tables stages --stages 2 4 --work 2
    python -m benchmarks.parts.scaling --device cuda --save benchmarks/results/scaling-cuda.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.harness import script
from benchmarks.harness.measure import Row
from benchmarks.parts.scaling import by_chunks, by_stages
from splitpipe import schedule

TABLES = ("chunks", "stages")
#: Why two pipelines are not in the table of stages, which the table ``drop-in`` shows in numbers.
ONE_THREAD = (
    "drop-in pipelines, splitpipe's and torchgpipe's, from the table stages: autograd goes backward through all CPU "
    "devices in one thread, where emulated devices sleep one after the other"
)


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("scaling", __doc__)
    add = parser.add_argument
    add("--tables", nargs="+", choices=TABLES, help="what to measure (both; on a GPU chunks)")
    add("--passes", type=int, default=4, help="timed rounds")
    add("--device", default="cpu", help="of the table chunks, as in cuda: all GPUs, or parts of the only one")
    add("--preset", choices=sorted(by_chunks.PRESETS), help="sizes of the GPT (small; on a GPU large, in bfloat16)")
    add("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="microbatches")
    add("--parts", type=int, help="stages of the table chunks (2; on GPUs as many as there are, or 4 parts of one)")
    add("--stages", type=int, nargs="+", default=[1, 2, 4, 8], help="emulated devices")
    add("--each", type=int, default=4, help="microbatches for each emulated device")
    add("--work", type=float, default=1.0, metavar="S", help="seconds that these sleep in a step, all together")
    add("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1", "zb-v"], choices=schedule.names(),
        metavar="NAME", help="of emulated devices (gpipe 1f1b zb-h1 zb-v)")
    return parser


def faults(options: argparse.Namespace) -> str | None:
    """The first fault of the numbers that were given."""
    preset = by_chunks.PRESETS[options.preset]
    for name in ("passes", "parts", "each", "work", "chunks", "stages"):
        given = getattr(options, name)
        if any(number <= 0 for number in (given if isinstance(given, list) else [given]) if number is not None):
            return f"--{name}: found {given}, expected more than 0"
    if max(options.chunks) > preset.rows:
        return f"--chunks: found {max(options.chunks)}, expected at most {preset.rows}, the rows of a batch"
    if options.parts and options.parts > preset.blocks:
        return f"--parts: found {options.parts}, expected at most {preset.blocks}, the blocks of the model"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code, 1 if losses or gradients differ."""
    parser = make_parser()
    options = parser.parse_args(argv)
    gpu = options.device != "cpu"
    options.preset = options.preset or ("large" if gpu else "small")
    wanted = options.tables or TABLES[: 1 if gpu else 2]
    wrong = faults(options)
    if wrong:
        parser.error(wrong)

    torch.set_num_threads(1)
    devices = by_chunks.places(options.device, options.parts) if "chunks" in wanted else []
    who, left_out = by_chunks.contenders(options.device, devices) if "chunks" in wanted else ([], [])
    left_out += [ONE_THREAD] * ("stages" in wanted)
    torchgpipe = by_chunks.missing() is None
    environment = script.environment(
        left_out, ["torchgpipe"] * torchgpipe, preset=options.preset, devices=[str(each) for each in devices]
    )
    tables: dict[str, list[Row]] = {}
    if "chunks" in wanted:
        try:
            tables |= by_chunks.measured(
                who, options.preset, sorted(set(options.chunks)), options.passes, options.device, devices
            )
        except ArithmeticError as error:
            print(error)
            return 1
    if "stages" in wanted:
        tables["stages"] = by_stages.scheduled(
            options.stages, options.schedules, options.each, options.work, options.passes
        )
        tables["drop-in"] = by_stages.dropin(4, 8, options.work / 4, options.passes, torchgpipe)
    return script.finish(options, environment, tables)


if __name__ == "__main__":
    script.run(main)
