"""The host's time for a step, which is what limits a process that launches the kernels of all devices.

The kernels of a CPU hide it. On torch's CUDA build with a runtime whose kernels do nothing, a step is what the host
does and nothing else: `python -m tests.softcuda host`. On a GPU the same is measured as long as its kernels are shorter
than their launches. The layers are blocks of LayerNorm, Linear, GELU, Linear and a sum. Each pipeline's step is
compared, in the same rounds, with torchgpipe's of the same checkpointing, with the module called microbatch by
microbatch without a pipeline, and with the same pipeline in autograd. Launches are counted, not timed.

Example:
    python -m tests.softcuda host -- --save benchmarks/results/host.json
    python -m tests.softcuda host -- --devices 2 --passes 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from benchmarks.parts.overhead import Loop, cuts
from splitpipe import SplitPipe

Step = Callable[[], object]
LOOP = "microbatch loop"
MODES = "never", "except_last", "always"
#: Scheduled ways: schedule and checkpointing.
SCHEDULED = ("1f1b", "never"), ("1f1b", "always"), ("zb-h1", "never")


class Block(nn.Module):
    """Five ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def steps(options: argparse.Namespace, count: int, peer: bool) -> dict[str, Step]:
    """Forward and backward of a batch, by who does it.

    Args:
        options: of the command line.
        count: of devices.
        peer: whether torchgpipe is there.
    """
    devices = [f"{options.kind}:{index}" for index in range(count)]
    balance = [options.blocks // count] * count
    x = torch.randn(options.batch, options.width, device=devices[0])
    target = torch.randn(options.batch, options.width, device=devices[-1])
    shared: dict[str, Any] = {"devices": devices, "chunks": options.chunks}

    def blocks() -> nn.Sequential:
        return nn.Sequential(*[Block(options.width) for _ in range(options.blocks)])

    def dropin(model: nn.Module) -> Step:
        def step() -> None:
            model.zero_grad()
            F.mse_loss(model(x), target).backward()

        return step

    def scheduled(model: nn.Module) -> Step:
        def step() -> None:
            model.zero_grad()
            model(x, target=target).backward()

        return step

    found = {LOOP: loop(blocks().to(devices[0]), x, target.to(devices[0]), options.chunks)}
    for by in ("Sequential", "cuts"):
        for backward in ("split", "autograd"):
            def wrapped(checkpoint: Any, by: str = by, backward: Any = backward, **more: Any) -> SplitPipe:
                more = {**shared, "checkpoint": checkpoint, "backward": backward, **more}
                if by == "cuts":
                    return SplitPipe(Loop(blocks()), cuts=cuts(balance), **more)
                return SplitPipe(blocks(), balance, **more)

            for mode in MODES:
                found[f"{by}, drop-in, {mode}, {backward}"] = dropin(wrapped(mode))
            for schedule, mode in SCHEDULED:
                model = wrapped(mode, schedule=schedule, loss_fn=F.mse_loss)
                found[f"{by}, {schedule}, {mode}, {backward}"] = scheduled(model)
    if peer:
        from torchgpipe import GPipe

        for mode in MODES:
            found[f"torchgpipe, {mode}"] = dropin(GPipe(blocks(), balance, checkpoint=mode, **shared))
    return found


def loop(model: nn.Module, x: Tensor, target: Tensor, chunks: int) -> Step:
    """A step of the module itself, called microbatch by microbatch."""
    def step() -> None:
        model.zero_grad()
        for part, its in zip(x.chunk(chunks), target.chunk(chunks)):
            (F.mse_loss(model(part), its) / chunks).backward()

    return step


def counted(step: Step) -> int | None:
    """The kernels that a step launches, where the fake runtime counts them."""
    softcuda = sys.modules.get("softcuda")
    if softcuda is None:
        return None
    softcuda.forget_kernels()
    step()
    measure.synchronize()
    launched: int = softcuda.launched()
    return launched


def cost(options: argparse.Namespace, peer: bool) -> list[Row]:
    """A line for each way, by number of devices."""
    rows: list[Row] = []
    for count in options.devices:
        runs = steps(options, count, peer)
        found = measure.interleaved(runs, options.passes, warm_up=2)
        launches = {name: counted(step) for name, step in runs.items()}
        for name, its in found.items():
            *ways, backward = name.split(", ")
            row: Row = {"devices": count, "way": name, "ms": 1e3 * min(its.wall), "median": 1e3 * its.median,
                        "processor, ms": 1e3 * min(its.cpu), "launches": launches[name]}
            rivals = {"/ loop": LOOP, "/ autograd": ", ".join([*ways, "autograd"])}
            if ways:
                rivals["/ torchgpipe"] = f"torchgpipe, {name.split(', ')[2 if len(ways) > 2 else 1]}"
            row |= {what: measure.ratio(its.wall, found[other].wall) for what, other in rivals.items()
                    if other in found and other != name}
            rows.append(row)
        show(rows, count)
    return rows


def show(rows: Sequence[Row], count: int) -> None:
    """Says what there is so far: it takes its time."""
    print(measure.table([row for row in rows if row["devices"] == count]), file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("host", __doc__)
    parser.add_argument("--kind", default="cuda", help="of devices")
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], help="how many")
    parser.add_argument("--blocks", type=int, default=48, help="of all devices together")
    parser.add_argument("--width", type=int, default=64, help="of a block")
    parser.add_argument("--batch", type=int, default=64, help="rows")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--passes", type=int, default=11, help="timed rounds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables; the exit code."""
    options = make_parser().parse_args(argv)
    torch.set_num_threads(1)
    peer = find_spec("torchgpipe") is not None
    missing = "torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
    environment = script.environment([] if peer else [missing], ["torchgpipe"] * peer)
    return script.finish(options, environment, {"host": cost(options, peer)})


if __name__ == "__main__":
    script.run(main)
