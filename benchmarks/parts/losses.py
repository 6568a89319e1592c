"""What it costs to trace a loss: a step compared with the same one with reduction="mean", where nothing is traced.

The layers are small, so that a step is mostly the host's time.

Example:
    python -m benchmarks.parts.losses --save benchmarks/results/losses-cpu.json
    python -m benchmarks.parts.losses --stages 4 --chunks 32 --passes 5
"""

from __future__ import annotations

import argparse
import operator
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from benchmarks.models.loop import Loop, cuts
from splitpipe import SplitPipe

IGNORED, CLASSES = -100, 8
#: The model computes the loss itself, drop-in or by a schedule, or the pipeline calls a ``loss_fn``.
WAYS = "own, drop-in", "own, 1f1b", "loss_fn, 1f1b"
#: Layers of a stage; many of them show what it costs to find that there is no loss.
FEW, MANY = 2, 16


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the rows that count, in ten functions of torch."""
    counted = target.reshape(-1) != IGNORED
    each = F.cross_entropy(output.reshape(-1, CLASSES), target.reshape(-1), reduction="none", ignore_index=IGNORED)
    return (each * counted.float()).sum() / counted.float().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": lambda output, target: F.mse_loss(output, output.detach() + 1),
    "cross_entropy": lambda output, target: F.cross_entropy(
        output.reshape(-1, CLASSES), target.reshape(-1), ignore_index=IGNORED),
    "by hand": by_hand,
    "no loss": lambda output, target: output,
}


class OwnLoss(Loop):
    """Computes its own loss."""

    def __init__(self, layers: Iterable[nn.Module], loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(layers)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return {"loss": self.loss(super().forward(x), labels)}


def step(name: str, way: str, reduction: str | None, blocks: int, options: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward.

    Args:
        name: of the loss.
        way: one of ``WAYS``.
        reduction: as SplitPipe takes it.
        blocks: layers in all.
        options: of the command line.
    """
    stages, chunks = options.stages, options.chunks
    layers, balance = [nn.Linear(CLASSES, CLASSES) for _ in range(blocks)], [blocks // stages] * stages
    shared: dict[str, Any] = {"devices": [options.device] * stages, "chunks": chunks, "checkpoint": "never"}
    shared |= {"reduction": reduction} | ({} if way == "own, drop-in" else {"schedule": "1f1b"})
    x = torch.randn(chunks, 4, CLASSES, device=options.device)
    labels = torch.randint(CLASSES, (chunks, 4), device=options.device)
    if way == "loss_fn, 1f1b":
        model = SplitPipe(nn.Sequential(*layers), balance, loss_fn=LOSSES[name], **shared)
        return lambda: model(x, target=labels).backward()
    model = SplitPipe(OwnLoss(layers, LOSSES[name]), cuts=cuts(balance), **shared)
    return lambda: model(x, labels=labels)["loss"].sum().backward()


def cost(options: argparse.Namespace) -> list[Row]:
    """A line for each loss and way."""
    rows: list[Row] = []
    cases = [(name, way, FEW) for name in LOSSES for way in WAYS if name != "no loss" or way == "own, drop-in"]
    for name, way, each in [*cases, ("no loss", "own, drop-in", MANY)]:
        blocks = each * options.stages
        steps = {str(reduction): step(name, way, reduction, blocks, options) for reduction in (None, "mean")}
        timings = measure.interleaved(steps, options.passes, warm_up=3)
        one, other = timings["None"], timings["mean"]
        pairs = {"us": (one.wall, other.wall), "processor, us": (one.cpu, other.cpu)}
        row: Row = {"loss": name, "way": way, "blocks": blocks, "stages": options.stages, "chunks": options.chunks, **{
            f"longer, {unit} a microbatch": 1e6 / options.chunks * statistics.median(map(operator.sub, *both))
            for unit, both in pairs.items()
        }, "/ with reduction": measure.ratio(one.wall, other.wall)}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("losses", __doc__)
    parser.add_argument("--device", default="cpu", help="of all stages, as in cpu or cuda:0")
    parser.add_argument("--stages", type=int, default=2, help="how many")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--passes", type=int, default=31, help="timed rounds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table; the exit code."""
    options = make_parser().parse_args(argv)
    torch.set_num_threads(1)
    return script.finish(options, script.environment(), {"losses": cost(options)})


if __name__ == "__main__":
    script.run(main)
