"""The host's cost of a pipeline: what a step of layers that compute almost nothing takes beyond the layers themselves.

For each microbatch and stage a pipeline cuts, hands over, runs the layers in another thread, orders backward, and
gathers. A step of n stages and m microbatches, less one of the same layers called m times in a plain loop, by m n, is
the cost of that. The layers, one a stage: `scale`, whose parameter the split engine has no rule for, and `linear`,
whose weight gradient it defers. By cuts, the same layers are a module whose forward calls them in a loop.

A second table has the same GPT as an nn.Sequential and as a module with cuts: the ratio of their steps. A third one has
layers of many ops that compute almost nothing, as they are and compiled. A fourth one has losses: what it takes to find
out what a loss is made of, beside reduction="mean", which says it.

Example:
    python -m benchmarks.parts.overhead --save benchmarks/results/overhead-cpu.json
    python -m benchmarks.parts.overhead --passes 3 --stages 4 --chunks 8
    python -m benchmarks.parts.overhead --tables losses --save benchmarks/results/losses-cpu.json
"""

from __future__ import annotations

import argparse
import copy
import operator
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import measure, script
from benchmarks.harness.compiling import COMPILED
from benchmarks.harness.measure import Row
from benchmarks.models.gpt import gpt
from benchmarks.models.loop import Loop, cuts
from splitpipe import SplitPipe

TARGET = 0.5  # of torchgpipe's cost
TABLES = "overhead", "cuts", "compiled", "losses"
Checkpoint = Literal["never", "except_last", "always"]
Step = Callable[[], object]


class Scale(nn.Module):
    """A multiplication by a parameter: the least that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Many(nn.Sequential):
    """As many multiplications as a block of a network has ops."""

    def __init__(self, count: int) -> None:
        super().__init__(*[Scale() for _ in range(count)])


LAYERS: dict[str, Callable[[], nn.Module]] = {"scale": Scale, "linear": lambda: nn.Linear(1, 1)}


def steps(
    layer: str, stages: int, chunks: int, checkpoint: Checkpoint, device: str, peer: bool
) -> dict[str, Step]:
    """Forward and backward of a batch of one row a microbatch, by who does it.

    Args:
        layer: name of the stages' layer.
        stages: how many.
        chunks: how many microbatches.
        checkpoint: as of SplitPipe.
        device: of all stages.
        peer: whether torchgpipe is there.
    """
    x = torch.ones(chunks, 1, device=device)

    def layers() -> nn.Sequential:
        return nn.Sequential(*[LAYERS[layer]() for _ in range(stages)])

    def loop() -> Step:
        alone = layers().to(device)

        def step() -> None:
            outputs = [alone(part) for part in x.chunk(chunks)]
            torch.cat(outputs).sum().backward()

        return step

    def of(model: nn.Module) -> Step:
        return lambda: model(x).sum().backward()

    pipeline: dict[str, Any] = {"devices": [device] * stages, "chunks": chunks, "checkpoint": checkpoint}
    found = {"loop": loop()}
    for backward in ("split", "autograd"):
        found[f"splitpipe, {backward}"] = of(SplitPipe(layers(), [1] * stages, backward=backward, **pipeline))
        by_cuts = SplitPipe(Loop(layers()), cuts=cuts([1] * stages), backward=backward, **pipeline)
        found[f"splitpipe by cuts, {backward}"] = of(by_cuts)
    if peer:
        from torchgpipe import GPipe

        found["torchgpipe"] = of(GPipe(layers(), [1] * stages, **pipeline))
    return found


def cost(options: argparse.Namespace, peer: bool) -> list[Row]:
    """A line for each case and pipeline."""
    rows: list[Row] = []
    cases = [
        (layer, checkpoint, stages, chunks)
        for layer in options.layers
        for checkpoint in options.checkpoint
        for stages in options.stages
        for chunks in options.chunks
    ]
    for layer, checkpoint, stages, chunks in cases:
        runs = steps(layer, stages, chunks, checkpoint, options.device, peer)
        found = measure.interleaved(runs, options.passes, warm_up=3)
        loop, each = found.pop("loop"), 1e6 / (stages * chunks)

        def own(times: Sequence[float], less: Sequence[float], each: float = each) -> list[float]:
            return [each * (time - alone) for time, alone in zip(times, less, strict=True)]

        theirs = own(found["torchgpipe"].wall, loop.wall) if peer else None
        for name, timings in found.items():
            costs = own(timings.wall, loop.wall)
            low, middle, high = statistics.quantiles(costs, n=4) if len(costs) > 1 else costs * 3
            row: Row = {
                "layer": layer, "checkpoint": checkpoint, "stages": stages, "chunks": chunks, "pipeline": name,
                "us a microbatch and stage": middle, "25 %": low, "75 %": high,
                "layers alone, us": each * loop.median,
                "processor, us": statistics.median(own(timings.cpu, loop.cpu)),
            }
            as_layers = f"splitpipe, {name.rpartition(', ')[2]}"
            if name.startswith("splitpipe by cuts"):
                row["/ as an nn.Sequential"] = middle / statistics.median(own(found[as_layers].wall, loop.wall))
            elif theirs is not None:
                row["/ torchgpipe"] = middle / statistics.median(theirs)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def mean_square(output: Tensor, _: Tensor) -> Tensor:
    """A loss that takes no time."""
    return output.square().mean()


#: The ways of a step that are compared.
WAYS: dict[str, dict[str, Any]] = {
    "drop-in, never": {"checkpoint": "never"},
    "drop-in, except_last": {"checkpoint": "except_last"},
    "drop-in, always": {"checkpoint": "always"},
    "1f1b": {"schedule": "1f1b", "loss_fn": mean_square},
    "1f1b, always": {"schedule": "1f1b", "loss_fn": mean_square, "checkpoint": "always"},
    "zb-h1": {"schedule": "zb-h1", "loss_fn": mean_square},
}


def both(options: argparse.Namespace) -> list[Row]:
    """The same GPT as an nn.Sequential and as a module with cuts, each step of one beside one of the other."""
    rows: list[Row] = []
    layers = gpt(context=64, width=options.width, heads=4, layers=options.blocks, dropout=0.0)
    half = len(layers) // 2
    balance = [half, len(layers) - half]
    x = torch.randint(256, (2 * options.gpt_chunks, 64), device=options.device)
    shared: dict[str, Any] = {"devices": [options.device] * 2, "chunks": options.gpt_chunks}

    def step(model: nn.Module, scheduled: bool) -> Step:
        return partial(_step, model, x, scheduled)

    for name, way in WAYS.items():
        scheduled = "schedule" in way
        runs = {
            "layers": step(SplitPipe(copy.deepcopy(layers), balance, **shared, **way), scheduled),
            "cuts": step(SplitPipe(Loop(copy.deepcopy(layers)), cuts=cuts(balance), **shared, **way), scheduled),
        }
        found = measure.interleaved(runs, options.gpt_passes, warm_up=2)
        row: Row = {
            "way": name, "as an nn.Sequential, ms": 1e3 * found["layers"].median,
            "by cuts, ms": 1e3 * found["cuts"].median,
            "by cuts / as an nn.Sequential": measure.ratio(found["cuts"].wall, found["layers"].wall),
            "processor": measure.ratio(found["cuts"].cpu, found["layers"].cpu),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def compiled(options: argparse.Namespace) -> list[Row]:
    """Layers of many ops, as they are and compiled: what each takes a microbatch and stage, the ops included."""
    how = {**COMPILED, "backend": options.compile} if options.compile == "inductor" else {"backend": options.compile}
    stages, chunks, rows = options.stages[0], options.chunks[0], list[Row]()
    x = torch.ones(chunks, 1, device=options.device)
    for name in "drop-in, never", "drop-in, always", "1f1b", "zb-h1":
        way, runs = WAYS[name], dict[str, Step]()
        for compile in (False, how):
            layers = nn.Sequential(*[Many(options.ops) for _ in range(stages)])
            model = SplitPipe(
                layers, [1] * stages, devices=[options.device] * stages, chunks=chunks, compile=compile, **way
            )
            runs["compiled" if compile else "as they are"] = partial(_step, model, x, "schedule" in way)
        found = measure.interleaved(runs, options.passes, warm_up=3)
        each = 1e6 / (stages * chunks)
        row: Row = {
            "way": name, "stages": stages, "chunks": chunks, "by": options.compile,
            **{f"{how}, us": each * its.median for how, its in found.items()},
            "compiled / as they are": measure.ratio(found["compiled"].wall, found["as they are"].wall),
            "processor": measure.ratio(found["compiled"].cpu, found["as they are"].cpu),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the rows that count, in ten functions of torch."""
    counted = target.reshape(-1) != IGNORED
    each = F.cross_entropy(output.reshape(-1, CLASSES), target.reshape(-1), reduction="none", ignore_index=IGNORED)
    return (each * counted.float()).sum() / counted.float().sum()


IGNORED = -100
CLASSES = 8
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


def losses(options: argparse.Namespace) -> list[Row]:
    """What it takes to find out what a loss is made of: a step beside the same one with reduction="mean"."""
    rows: list[Row] = []
    stages, chunks = options.stages[0], options.chunks[0]
    shared: dict[str, Any] = {"devices": [options.device] * stages, "chunks": chunks, "checkpoint": "never"}
    x = torch.randn(chunks, 4, CLASSES, device=options.device)
    labels = torch.randint(CLASSES, (chunks, 4), device=options.device)

    def made(name: str, way: str, blocks: int, reduction: str | None) -> Step:
        layers, balance = [nn.Linear(CLASSES, CLASSES) for _ in range(blocks)], [blocks // stages] * stages
        if way == "loss_fn, 1f1b":
            model = SplitPipe(
                nn.Sequential(*layers), balance, schedule="1f1b", loss_fn=LOSSES[name], reduction=reduction, **shared)
            return lambda: model(x, target=labels).backward()
        more = {"schedule": "1f1b"} if way == "own, 1f1b" else {}
        model = SplitPipe(OwnLoss(layers, LOSSES[name]), cuts=cuts(balance), reduction=reduction, **shared, **more)
        return lambda: model(x, labels=labels)["loss"].sum().backward()

    cases = [(name, way, 2 * stages) for name in LOSSES for way in ("own, drop-in", "own, 1f1b", "loss_fn, 1f1b")
             if name != "no loss" or way == "own, drop-in"]
    for name, way, blocks in [*cases, ("no loss", "own, drop-in", 16 * stages)]:
        runs = {str(reduction): made(name, way, blocks, reduction) for reduction in (None, "mean")}
        found = measure.interleaved(runs, options.passes, warm_up=3)
        one, other = found["None"], found["mean"]
        pairs = {"us": (one.wall, other.wall), "processor, us": (one.cpu, other.cpu)}
        row: Row = {"loss": name, "way": way, "blocks": blocks, "stages": stages, "chunks": chunks, **{
            f"found out, {unit} a microbatch": 1e6 / chunks * statistics.median(map(operator.sub, *both))
            for unit, both in pairs.items()
        }, "found out / told": measure.ratio(one.wall, other.wall)}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def _step(model: nn.Module, x: Tensor, scheduled: bool) -> None:
    (model(x, target=x) if scheduled else mean_square(model(x), x)).backward()


def verdict(rows: Sequence[Row]) -> list[Row]:
    """The verdict on the target, by layer and checkpoint mode: in the worst case."""
    found: list[Row] = []
    own = [row for row in rows if row["pipeline"] != "torchgpipe" and "/ torchgpipe" in row]
    for pipeline, layer, checkpoint in dict.fromkeys((row["pipeline"], row["layer"], row["checkpoint"]) for row in own):
        those = [row for row in own if (row["pipeline"], row["layer"], row["checkpoint"]) ==
                 (pipeline, layer, checkpoint)]
        worst = max(those, key=lambda row: float(row["/ torchgpipe"]))
        found.append({
            "pipeline": pipeline, "layer": layer, "checkpoint": checkpoint,
            "of torchgpipe's, median of cases": statistics.median(row["/ torchgpipe"] for row in those),
            "worst": worst["/ torchgpipe"], "where": f"{worst['stages']} stages, {worst['chunks']} chunks",
            "at most": TARGET, "met": worst["/ torchgpipe"] <= TARGET,
        })
    return found


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("overhead", __doc__)
    modes = ["never", "except_last", "always"]
    parser.add_argument("--device", default="cpu", help="of all stages, as in cpu or cuda:0")
    parser.add_argument("--layers", nargs="+", choices=sorted(LAYERS), default=sorted(LAYERS), help="of a stage")
    parser.add_argument("--checkpoint", nargs="+", choices=modes, default=modes, help="modes")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4], help="how many")
    parser.add_argument("--chunks", nargs="+", type=int, default=[8, 32], help="microbatches")
    parser.add_argument("--passes", type=int, default=21, help="timed rounds")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--blocks", type=int, default=8, help="of the GPT")
    parser.add_argument("--gpt-chunks", type=int, default=8, help="microbatches of the GPT, of two rows each")
    parser.add_argument("--gpt-passes", type=int, default=11, help="timed rounds of the GPT")
    parser.add_argument("--compile", choices=["inductor", "aot_eager"], default="inductor", help="compiles layers")
    parser.add_argument("--ops", type=int, default=24, help="of a layer that is compiled")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which of them")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of torch's")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables; the exit code."""
    options = make_parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    peer = find_spec("torchgpipe") is not None
    missing = "torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
    environment = script.environment([] if peer else [missing], ["torchgpipe"] * peer)
    tables: dict[str, list[Row]] = {}
    if "overhead" in options.tables:
        tables["overhead"] = cost(options, peer)
        tables["targets"] = verdict(tables["overhead"])
    for name, make in {"cuts": both, "compiled": compiled, "losses": losses}.items():
        if name in options.tables:
            tables[name] = make(options)
    return script.finish(options, environment, tables)


if __name__ == "__main__":
    script.run(main)
