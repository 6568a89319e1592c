"""Cost and gain of backward="split", against backward="autograd" and the unwrapped module.

Example:
    python -m benchmarks.parts.backward all --save benchmarks/results/backward-cpu.json
    python -m benchmarks.parts.backward step --models mlp --chunks 1 32 --passes 5
    python -m benchmarks.parts.backward trace --device cuda --preset large --stages 4
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from benchmarks.harness.rounds import EXACT
from benchmarks.harness.subject import even
from benchmarks.parts.backward import calls, merging
from benchmarks.parts.backward.calls import ENGINES, Backward
from benchmarks.parts.backward.cases import PRESETS, Case, case
from splitpipe import SplitPipe

MiB = 2**20
MODULE, ROOT = "benchmarks.parts.backward", Path(__file__).resolve().parents[3]
MODES = ("never", "except_last", "always")


def wrapped(it: Case, options: argparse.Namespace, backward: Backward, **more: Any) -> SplitPipe:
    """The case's layers, about as many in each stage."""
    balance, devices = even(len(it.layers), options.stages), [options.device] * options.stages
    return SplitPipe(it.layers, balance, devices=devices, backward=backward, **more)


def step(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Step times, a row for each model and number of microbatches, nothing checkpointed."""
    preset, rows = PRESETS[options.preset], []
    for name in options.models:
        for chunks in options.chunks:
            limits: dict[str, int | None] = {"split": None}
            limits.update({f"split {limit} MiB": limit * MiB for limit in options.stash_limits})
            steps = {}
            for variant, limit in limits.items():
                it = case(name, preset, options.device)
                steps[variant] = it.step(
                    wrapped(it, options, "split", chunks=chunks, checkpoint="never", stash_limit=limit)
                )
            it = case(name, preset, options.device)
            steps["autograd"] = it.step(wrapped(it, options, "autograd", chunks=chunks, checkpoint="never"))
            it = case(name, preset, options.device)
            steps["unwrapped"] = it.step(it.layers)
            found = measure.interleaved(steps, options.passes)
            for variant in [name for name in steps if name not in ("autograd", "unwrapped")]:
                rows.append(_step_row(name, chunks, variant, found))
                print(rows[-1], file=sys.stderr, flush=True)
            del steps, it
            gc.collect()
    return {"step": rows}


def _step_row(name: str, chunks: int, variant: str, found: dict[str, measure.Timings]) -> Row:
    split, autograd, unwrapped = found[variant], found["autograd"], found["unwrapped"]
    return {
        "model": name,
        "chunks": chunks,
        "variant": variant,
        "split, ms": split.median * 1e3,
        "autograd, ms": autograd.median * 1e3,
        "unwrapped, ms": unwrapped.median * 1e3,
        "split / autograd": measure.ratio(split.wall, autograd.wall),
        "of medians": split.median / autograd.median,
        "of minima": min(split.wall) / min(autograd.wall),
        "of processor time": measure.ratio(split.cpu, autograd.cpu),
        "split / unwrapped": measure.ratio(split.wall, unwrapped.wall),
        "page faults": sum(split.faults) // len(split.faults),
        "autograd's": sum(autograd.faults) // len(autograd.faults),
    }


def cost(options: argparse.Namespace) -> dict[str, list[Row]]:
    """The engine's own microseconds a call, on the CPU, with one thread and tensors too small to matter."""
    torch.set_num_threads(1)
    return {
        "cost of a caught call, forward and backward": calls.caught(options.calls, options.passes),
        "cost of an uncaught call": calls.uncaught(options.calls, options.passes),
    }


def memory(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Peak bytes of a step beyond model and batch, for each checkpoint mode."""
    rows = []
    for name in options.models:
        for mode in MODES:
            row: Row = {"model": name, "checkpoint": mode, "chunks": options.chunks[0]}
            for allocator in ("exact", "default") if options.device == "cpu" else ("device",):
                found = {each: _peak(options, name, mode, each, allocator) for each in ENGINES}
                row.update({f"{each}, MiB ({allocator})": peak / MiB for each, peak in found.items()})
                row[f"ratio ({allocator})"] = found["split"] / found["autograd"]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return {"memory": rows}


def _peak(options: argparse.Namespace, name: str, mode: str, backward: Backward, allocator: str) -> int:
    """Measured in a process of its own, which has no memory yet that others have freed."""
    command = [sys.executable, "-m", MODULE, "peak", "--models", name, "--checkpoint", mode]
    command += ["--backward", backward, "--preset", options.preset, "--device", options.device]
    command += ["--stages", str(options.stages), "--chunks", str(options.chunks[0]), "--passes", str(options.passes)]
    if options.stash_limits:
        command += ["--stash-limits", str(options.stash_limits[0])]
    exact = EXACT if allocator == "exact" else {}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **exact}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return int(done.stdout)


def peak(options: argparse.Namespace) -> None:
    """Prints the peak of one case, for ``memory``."""
    it = case(options.models[0], PRESETS[options.preset], options.device)
    limit = options.stash_limits[0] * MiB if options.stash_limits else None
    more = {"chunks": options.chunks[0], "checkpoint": options.checkpoint, "stash_limit": limit}
    run = it.step(wrapped(it, options, options.backward, **more))
    on_cpu = options.device == "cpu"
    if on_cpu:
        case("mlp", PRESETS["tiny"], "cpu").step(case("mlp", PRESETS["tiny"], "cpu").layers)()  # Loads autograd.
        before = measure.forget_peak()
    else:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.passes):
        run()
        measure.synchronize()
    print(measure.growth(before) if on_cpu else torch.cuda.max_memory_allocated() - before)


def merge(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Ways to compute the weight gradient of several microbatches."""
    shapes = merging.grid(options.preset == "tiny", device=options.device, dtype=PRESETS[options.preset].dtype)
    junk = torch.zeros(2**26 if options.cold else 0, device=options.device)
    rows = merging.measure(shapes, options.chunks, options.passes, lambda: junk.add_(1))
    return {f"{kind}, {'cold' if options.cold else 'warm'} caches": [row for row in rows if row["layer"] == kind]
            for kind in dict.fromkeys(shape.kind for shape in shapes)}


def trace(options: argparse.Namespace) -> dict[str, list[Row]]:
    """How much of the time of the weight gradients' kernels lies beside others'; on a CUDA device."""
    it = case(options.models[0], PRESETS[options.preset], options.device)
    run = it.step(wrapped(it, options, "split", chunks=options.chunks[0], checkpoint="never"))
    for _ in range(3):
        run()
    with torch.profiler.profile() as profile:
        run()
        measure.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or str(Path(folder, "trace.json"))
        profile.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    return {"streams": measure.overlap([event for event in events if event.get("cat") == "kernel"])}


def everything(options: argparse.Namespace) -> dict[str, list[Row]]:
    """The parts, each in a process of its own, as each would be run by itself."""
    tables: dict[str, list[Row]] = {}
    parts = [["step"], ["cost"], ["memory"], ["merge"], ["merge", "--cold"]]
    with tempfile.TemporaryDirectory() as folder:
        for part in parts if options.device == "cpu" else [*parts[:1], *parts[2:4], ["trace"]]:
            path = Path(folder, "part.json")
            given = ["--device", options.device, "--preset", options.preset, "--stages", str(options.stages)]
            given += [] if options.passes is None else ["--passes", str(options.passes)]
            subprocess.run([sys.executable, "-m", MODULE, *part, *given, "--save", str(path)], cwd=ROOT, check=True)
            tables.update(json.loads(path.read_text())["tables"])
    return tables


# Its function, what it does, passes and microbatches if nobody says, and the options of its own.
PARTS: dict[str, tuple[Callable[[argparse.Namespace], Any], str, int | None, list[int]]] = {
    "step": (step, "step time against autograd and the unwrapped module", 21, [1, 4, 8, 16, 32]),
    "cost": (cost, "the engine's own time a call", 41, []),
    "memory": (memory, "peak memory for each checkpoint mode", 3, [8]),
    "peak": (peak, "one case of memory, in this process", 3, [8]),
    "merge": (merge, "ways to sum weight gradients of several microbatches", 15, [4, 8, 16, 32]),
    "trace": (trace, "weight gradients beside other kernels, on a CUDA device", 1, [8]),
    "all": (everything, "all of it, one after the other", None, []),
}


def make_parser() -> argparse.ArgumentParser:
    """All parts and their options."""
    parser = argparse.ArgumentParser(f"python -m {MODULE}", description=__doc__, formatter_class=script.Help)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, (_, meaning, passes, chunks) in PARTS.items():
        part = parts.add_parser(name, help=meaning, description=meaning, formatter_class=script.Help)
        script.saving(part)
        add = part.add_argument
        add("--device", default="cpu", help="of every stage, as in cuda or cuda:0")
        add("--preset", default="small", choices=sorted(PRESETS), help="sizes of the models; large is in bfloat16")
        add("--stages", type=int, default=2, help="of the pipeline")
        add("--passes", type=int, default=passes, help="how often each thing is timed, or done")
        add("--threads", type=int, help="of torch's; unset: as many as it takes")
        if chunks:
            add("--chunks", type=int, nargs="+", default=chunks, help="microbatches")
        if name in ("step", "memory", "peak", "trace"):
            models = ["gpt"] if name == "trace" else ["mlp", "gpt"]
            add("--models", nargs="+", choices=("mlp", "gpt"), default=models, help="what to train")
        if name in ("step", "memory", "peak"):
            add("--stash-limits", type=int, nargs="*", default=[], metavar="MiB", help="limits to try, in MiB")
        if name == "peak":
            add("--checkpoint", choices=MODES, default="never", help="mode")
            add("--backward", choices=ENGINES, default="split", help="engine")
        if name == "cost":
            add("--calls", type=int, default=200, help="in a chain")
        if name == "merge":
            add("--cold", action="store_true", help="push the tensors out of the caches before each pass")
        if name == "trace":
            add("--trace", metavar="PATH", help="where the trace goes, for chrome://tracing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a part, prints its tables; the exit code."""
    options = make_parser().parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = script.environment()
    tables = PARTS[options.part][0](options)
    return 0 if tables is None else script.finish(options, found, tables)


if __name__ == "__main__":
    script.run(main)
