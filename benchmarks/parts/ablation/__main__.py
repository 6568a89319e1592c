"""The gain of each mechanism of the pipeline: torchgpipe's ablation of its timeline, for splitpipe, and two steps more.

By default in virtual time (virtual_time.py), on torch's CUDA build with the fake runtime, which needs no GPU. With
``--device cuda`` by the clock: on several GPUs, or on parts of one, where copies cost nothing.

Example:
    export SOFTCUDA_DEVICES=4
    python -m tests.softcuda python -- -m benchmarks.parts.ablation --save benchmarks/results/ablation.json
    python -m benchmarks.parts.ablation --device cuda --preset large --save benchmarks/results/ablation-cuda.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness import measure, script, tensor_memory
from benchmarks.harness.device_parts import parts
from benchmarks.harness.measure import Row
from benchmarks.models.unet import unet
from benchmarks.parts.ablation import variants, virtual_time
from benchmarks.parts.ablation.variants import Case, Training
from splitpipe import schedule
from splitpipe.balance import balance_by_time
from tests.devices.log import softcuda

MiB = 2**20
#: Of the U-Net that the clock is for: depth, convolutions a level, channels, side of an image, images in a batch.
PRESETS = {"tiny": (2, 1, 2, 8, 4), "small": (3, 2, 16, 64, 32), "large": (5, 5, 64, 192, 64)}


def devices(name: str, count: int) -> list[Any]:
    """So many GPUs; parts of one, if there are fewer or it is named by its index; on the CPU, threads."""
    if name == "cuda" and torch.cuda.device_count() >= count:
        return [f"cuda:{index}" for index in range(count)]
    return parts(name, count)


def case(options: argparse.Namespace) -> Case:
    """The U-Net of a preset, with a batch, on the device."""
    torch.manual_seed(0)
    depth, convolutions, channels, side, rows = PRESETS[options.preset]
    layers = unet(depth, convolutions, channels, dropout=0.0)
    x, y = torch.rand(rows, 3, side, side), torch.rand(rows, 1, side, side)
    known: dict[int, list[int]] = {}

    def balance(stages: int) -> list[int]:
        if stages not in known:
            known[stages] = balance_by_time(stages, layers, x[: -(-rows // options.chunks)], device=options.device)
        return known[stages]

    return Case(layers.to(options.device), x.to(options.device), y.to(options.device), balance)


def clock(options: argparse.Namespace) -> tuple[dict[str, list[Row]], list[str]]:
    """Step times and memory of all variants, and what was computed wrongly."""
    it, where = case(options), devices(options.device, options.devices)
    trainings: dict[str, Training] = {}
    faults: list[str] = []
    wanted = variants.expected(it, options.chunks)
    for variant in variants.variants(options.schedules):
        training = trainings[variant.name] = Training(variant, it, where, options.chunks, options.checkpoint)
        faults += [f"{variant.name}: {line}" for line in variants.strayed(it, training.results(), wanted)]
    steps: dict[str, Callable[[], object]] = {name: training.step for name, training in trainings.items()}
    timings = measure.interleaved(steps, options.passes)
    rows: list[Row] = []
    for name, its in timings.items():
        row: Row = {
            "variant": name,
            "ms": its.median * 1e3,
            "least": min(its.wall) * 1e3,
            "most": max(its.wall) * 1e3,
            "images a second": len(it.input) / its.median,
            "baseline / it": measure.ratio(timings["baseline"].wall, its.wall),
        }
        if options.device != "cpu":
            trainings[name].model.zero_grad(set_to_none=True)
            peaks = tensor_memory.peak(trainings[name].step, warm_up=0, device="cuda").devices.values()
            row.update({"peak, MiB": max(peaks) / MiB, "of all devices, MiB": sum(peaks) / MiB})
        rows.append(row)
    return {f"unet, {options.preset}": rows}, faults


def virtual(options: argparse.Namespace) -> tuple[dict[str, list[Row]], list[str]]:
    """All tables in virtual time, and what was computed wrongly."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # Nobody looks at the clock.
    found: dict[str, list[Row]] = {}
    faults: list[str] = []
    compared = variants.variants(options.schedules)
    for name in options.models:
        more, wrong = virtual_time.tables(
            name, compared, devices=options.devices, chunks=options.chunks, copies=options.copies,
            checkpoint=options.checkpoint, passes=options.passes,
        )
        found.update(more)
        faults += wrong
    return found, faults


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("ablation", __doc__)
    parser.add_argument("--device", default="virtual", help="virtual; by the clock: cuda, cuda:0 or cpu")
    parser.add_argument("--devices", type=int, default=4, help="how many, or how many parts of one")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--checkpoint", default="never", choices=["never", "except_last", "always"], help="mode")
    parser.add_argument("--schedules", nargs="+", default=["zb-h1", "zb-h2", "zb-v", "v-half"],
                        choices=[name for name in schedule.names() if name != "gpipe"], metavar="NAME",
                        help="to compare")
    parser.add_argument("--passes", type=int, default=11, help="steps of each variant")
    parser.add_argument("--models", nargs="+", default=list(virtual_time.MODELS),
                        choices=list(virtual_time.MODELS), help="in virtual time")
    parser.add_argument("--copies", nargs="+", type=float, default=[0.0, 0.25, 0.5],
                        help="in virtual time: of a copy, in units of a forward")
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS), help="by the clock: the U-Net")
    parser.add_argument("--threads", type=int, help="by the clock: of torch's; unset: as many as it takes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code, 1 if losses or gradients differ."""
    options = make_parser().parse_args(argv)
    environment = script.environment()
    faults: list[str] = []
    tables: dict[str, list[Row]] = {}
    if options.device == "virtual" and softcuda is None:
        why = "found no fake CUDA runtime: expected to be run by python -m tests.softcuda python -- -m ..."
        environment["left_out"] = [f"{name}: {why}" for name in options.models]
        print(f"left out: {why}", file=sys.stderr)
    elif options.device == "virtual":
        tables, faults = virtual(options)
    else:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        torch.backends.cudnn.allow_tf32 = False  # Else the results would differ by more than a pipeline's mistakes.
        tables, faults = clock(options)
    code = script.finish(options, environment, tables, bool(faults))
    if tables:
        print("\n" + ("\n".join(faults) or "losses and gradients: those of the unwrapped model, of all variants"))
    return code


if __name__ == "__main__":
    script.run(main)
