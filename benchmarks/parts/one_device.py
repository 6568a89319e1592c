"""Parts of one GPU as devices: schedules against each other, against the drop-in pipeline, split against fused.

A green context has a share of a GPU's multiprocessors, and a stream of its own, which SplitPipe takes as a device. So
one GPU stands for several, with real kernels; copies between them cost nothing. On the CPU each part is a thread.

Example:
    python -m benchmarks.parts.one_device --device cuda --preset large --save benchmarks/results/parts-cuda.json
    python -m benchmarks.parts.one_device --preset tiny --passes 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness import measure, script, tensor_memory
from benchmarks.harness.device_parts import parts
from benchmarks.harness.measure import Row
from benchmarks.harness.subject import even
from benchmarks.parts.backward.cases import PRESETS, Case, case
from splitpipe import SplitPipe, schedule

MiB = 2**20


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every byte."""
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def variants(options: argparse.Namespace, devices: list[Any]) -> dict[str, tuple[Any, Callable[[], None]]]:
    """The things to time, by name: the model, and a step of it."""
    found: dict[str, tuple[Any, Callable[[], None]]] = {}
    for name in ("drop-in", *options.schedules):
        for backward in ("split", "autograd"):
            it = _case(options)
            model = _wrapped(options, it, devices, name, backward=backward)
            if model is not None:
                found[f"{name}, {backward}"] = model, _step(model, it, scheduled=name != "drop-in")
    it = _case(options)
    found["unwrapped, the whole device"] = it.layers, _step(it.layers, it, scheduled=False)
    return found


def _case(options: argparse.Namespace) -> Case:
    it = case("gpt", PRESETS[options.preset], options.device)
    return Case(it.layers, it.input, it.target.view(it.input.shape))


def _wrapped(options: argparse.Namespace, it: Case, devices: list[Any], name: str, **more: Any) -> SplitPipe | None:
    """The case's layers, about as many in each stage; None if there are too few."""
    stages = len(devices)
    if name != "drop-in":
        stages *= schedule.build(name, 1, 1).stages
        more.update(schedule=name, loss_fn=loss_fn)
    if stages > len(it.layers):
        return None
    balance = even(len(it.layers), stages)
    return SplitPipe(it.layers, balance, devices=devices, chunks=options.chunks, checkpoint="never", **more)


def _step(model: Any, it: Case, scheduled: bool) -> Callable[[], None]:
    device = next(it.layers.parameters()).device
    x, y = it.input.to(device), it.target.to(device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = model(x, target=y) if scheduled else loss_fn(model(x), y)
        loss.backward()

    return step


def steps(options: argparse.Namespace) -> list[Row]:
    """Step time, memory, and the part of it that a device computes, of each variant."""
    found = variants(options, parts(options.device, options.parts))
    runs: dict[str, Callable[[], object]] = {name: step for name, (_, step) in found.items()}
    timings = measure.interleaved(runs, options.passes)
    rows: list[Row] = []
    for name, (model, step) in found.items():
        row: Row = {
            "variant": name,
            "ms": timings[name].median * 1e3,
            "/ drop-in, split": measure.ratio(timings[name].wall, timings["drop-in, split"].wall),
        }
        if options.device != "cpu":
            row["peak, MiB"] = tensor_memory.peak(step, warm_up=0, device="cuda").total / MiB
        if isinstance(model, SplitPipe) and not name.startswith("drop-in"):
            with model.record() as timeline:
                for _ in range(3):
                    step()
            row["planned, ms"] = timeline.plan.makespan
            row["computing, %"] = 100 * sum(timeline.utilisation) / len(timeline.utilisation)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def recorder(options: argparse.Namespace) -> list[Row]:
    """The cost of recording: two models in turns, one of them recorded all the time."""
    devices = parts(options.device, options.parts)
    rows: list[Row] = []
    for name in options.schedules:
        cases = [_case(options) for _ in range(2)]
        on, off = (_wrapped(options, it, devices, name) for it in cases)
        if on is None:
            continue
        with on.record():
            runs: dict[str, Callable[[], object]] = {
                "on": _step(on, cases[0], scheduled=True), "off": _step(off, cases[1], scheduled=True)
            }
            found = measure.interleaved(runs, options.passes)
        rows.append({"schedule": name, "recorded / not": measure.ratio(found["on"].wall, found["off"].wall)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("one_device", __doc__)
    parser.add_argument("--device", default="cpu", help="whose parts they are, as in cuda or cuda:0")
    parser.add_argument("--parts", type=int, default=None, help="how many")
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS),
                        help="sizes of the GPT; large is bfloat16")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--passes", type=int, default=11, help="how often each thing is timed")
    parser.add_argument("--threads", type=int, help="of torch's; unset: as many as it takes")
    parser.add_argument("--schedules", nargs="+",
                        default=["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"],
                        choices=schedule.names(), help="to compare")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables; the exit code."""
    options = make_parser().parse_args(argv)
    if options.parts is None:
        options.parts = 2 if options.device == "cpu" else 4
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = script.environment()
    return script.finish(options, found, {"steps": steps(options), "recorder": recorder(options)})


if __name__ == "__main__":
    script.run(main)
