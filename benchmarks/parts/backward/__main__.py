"""What backward="split" costs and gains, against backward="autograd" and the unwrapped module.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import measure
from benchmarks.harness.measure import Row
from benchmarks.models.gpt import gpt
from benchmarks.models.mlp import mlp
from benchmarks.parts.backward import calls, merging, products
from benchmarks.parts.backward.calls import ENGINES, Backward
from splitpipe import SplitPipe

MiB = 2**20
MODULE, ROOT = "benchmarks.parts.backward", Path(__file__).resolve().parents[3]
MODES = ("never", "except_last", "always")


@dataclass(frozen=True)
class Preset:
    """The sizes of both models."""

    narrow: int
    wide: int
    linears: int
    mlp_rows: int
    width: int
    heads: int
    blocks: int
    context: int
    gpt_rows: int
    dtype: torch.dtype = torch.float32


PRESETS = {
    "tiny": Preset(4, 8, 4, 8, 8, 2, 2, 4, 4),
    "small": Preset(512, 2048, 8, 1024, 256, 4, 6, 128, 64),
    "large": Preset(2048, 8192, 8, 8192, 1024, 16, 24, 1024, 32, torch.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """A model with a batch: what a step is made of."""

    layers: nn.Sequential
    input: Tensor
    target: Tensor

    def step(self, model: nn.Module) -> Callable[[], None]:
        """Forward, loss and backward, as a training loop does them."""
        first, last = next(self.layers.parameters()).device, list(self.layers.parameters())[-1].device
        x, y = self.input.to(first), self.target.to(last)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(x).flatten(0, -2), y).backward()

        return step


def case(name: str, preset: Preset, device: str) -> Case:
    """The same weights and the same batch every time."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = mlp(narrow=preset.narrow, wide=preset.wide, layers=preset.linears)
        x = torch.randn(preset.mlp_rows, preset.narrow, dtype=preset.dtype)
        y = torch.randint(preset.narrow, (preset.mlp_rows,))
    else:
        layers = gpt(
            context=preset.context, width=preset.width, heads=preset.heads, layers=preset.blocks, dropout=0.0
        )
        x = torch.randint(256, (preset.gpt_rows, preset.context))
        y = torch.randint(256, (preset.gpt_rows * preset.context,))
    return Case(layers.to(device, preset.dtype), x, y)


def wrapped(it: Case, options: argparse.Namespace, backward: Backward, **more: Any) -> SplitPipe:
    """The case's layers, about as many in each stage."""
    count, stages = len(it.layers), options.stages
    even = [count * (stage + 1) // stages - count * stage // stages for stage in range(stages)]
    return SplitPipe(it.layers, balance=even, devices=[options.device] * stages, backward=backward, **more)


def waiting(device: str) -> Callable[[], object]:
    """What waits for the device."""
    return (lambda: None) if device == "cpu" else lambda: torch.accelerator.synchronize(torch.device(device))


def step(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Step times, a row for each model and number of microbatches, nothing checkpointed."""
    preset, rows = PRESETS[options.preset], []
    for name in options.models:
        for chunks in options.chunks:
            limits: dict[str, int | None] = {"split": None}
            limits.update({f"split {limit} MiB": limit * MiB for limit in options.stash_limits})
            steps = {}
            if options.plain_products:
                it = case(name, preset, options.device)
                model = wrapped(it, options, "split", chunks=chunks, checkpoint="never")
                steps["split, torch's products"] = products.without()(it.step(model))
            for variant, limit in limits.items():
                it = case(name, preset, options.device)
                steps[variant] = it.step(
                    wrapped(it, options, "split", chunks=chunks, checkpoint="never", stash_limit=limit)
                )
            it = case(name, preset, options.device)
            steps["autograd"] = it.step(wrapped(it, options, "autograd", chunks=chunks, checkpoint="never"))
            it = case(name, preset, options.device)
            steps["unwrapped"] = it.step(it.layers)
            found = measure.interleaved(steps, options.passes, synchronize=waiting(options.device))
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
    # Freed blocks go back to the system at once: the process has what its tensors have.
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if allocator == "exact" else {}
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
        before = measure.resident()
        measure.forget_peak()
    else:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.passes):
        run()
        waiting(options.device)()
    print((measure.peak() if on_cpu else torch.cuda.max_memory_allocated()) - before)


def merge(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Ways to compute the weight gradient of several microbatches."""
    shapes = merging.grid(options.preset == "tiny", device=options.device, dtype=PRESETS[options.preset].dtype)
    junk = torch.zeros(2**26 if options.cold else 0, device=options.device)
    rows = merging.measure(shapes, options.chunks, options.passes, lambda: junk.add_(1), waiting(options.device))
    return {f"{kind}, {'cold' if options.cold else 'warm'} caches": [row for row in rows if row["layer"] == kind]
            for kind in dict.fromkeys(shape.kind for shape in shapes)}


def product(options: argparse.Namespace) -> dict[str, list[Row]]:
    """The engine's products of matrices against torch's, on the CPU."""
    sizes = ((4, 8),) if options.preset == "tiny" else products.SIZES
    return {"products": products.measure(options.rows, options.passes, sizes)}


def trace(options: argparse.Namespace) -> dict[str, list[Row]]:
    """How much of the time of the weight gradients' kernels lies beside others'; on a CUDA device."""
    it = case(options.models[0], PRESETS[options.preset], options.device)
    run = it.step(wrapped(it, options, "split", chunks=options.chunks[0], checkpoint="never"))
    for _ in range(3):
        run()
    with torch.profiler.profile() as profile:
        run()
        waiting(options.device)()
    with tempfile.TemporaryDirectory() as room:
        path = options.trace or str(Path(room, "trace.json"))
        profile.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    return {"streams": measure.overlap([event for event in events if event.get("cat") == "kernel"])}


def everything(options: argparse.Namespace) -> dict[str, list[Row]]:
    """The parts, each in a process of its own, as each would be run by itself."""
    tables: dict[str, list[Row]] = {}
    parts = [["step"], ["cost"], ["memory"], ["merge"], ["merge", "--cold"], ["product"]]
    with tempfile.TemporaryDirectory() as room:
        for part in parts if options.device == "cpu" else [*parts[:1], *parts[2:4], ["trace"]]:
            path = Path(room, "part.json")
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
    "product": (product, "products of matrices, the engine's against torch's, on the CPU", 21, []),
    "trace": (trace, "weight gradients beside other kernels, on a CUDA device", 1, [8]),
    "all": (everything, "all of it, one after the other", None, []),
}


def parser() -> argparse.ArgumentParser:
    """All parts and their options."""
    it = argparse.ArgumentParser("backward.py", description="What backward='split' costs and gains.")
    parts = it.add_subparsers(dest="part", required=True, metavar="PART")
    for name, (_, meaning, passes, chunks) in PARTS.items():
        part = parts.add_parser(
            name, help=meaning, description=meaning, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        add = part.add_argument
        add("--device", default="cpu", help="of every stage, as in cuda or cuda:0")
        add("--preset", default="small", choices=sorted(PRESETS), help="sizes of the models; large is in bfloat16")
        add("--stages", type=int, default=2, help="of the pipeline")
        add("--passes", type=int, default=passes, help="how often each thing is timed, or done")
        add("--threads", type=int, help="of torch's; unset: as many as it takes")
        add("--save", metavar="PATH", help="where the tables go as JSON, with the environment")
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
        if name == "step":
            add("--plain-products", action="store_true", help="split also with torch's own products of matrices")
        if name == "product":
            add("--rows", type=int, nargs="+", default=[32, 64, 128, 256, 1024], help="of a microbatch")
        if name == "cost":
            add("--calls", type=int, default=200, help="in a chain")
        if name == "merge":
            add("--cold", action="store_true", help="push the tensors out of the caches before each pass")
        if name == "trace":
            add("--trace", metavar="PATH", help="where the trace goes, for chrome://tracing")
    return it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a part, prints its tables; the exit code."""
    options = parser().parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = measure.environment()
    tables = PARTS[options.part][0](options)
    for title, rows in (tables or {}).items():
        print(f"\n{title}\n\n{measure.table(rows)}", flush=True)
    if options.save and tables:
        measure.save(options.save, found, tables)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
