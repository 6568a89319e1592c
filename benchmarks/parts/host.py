"""The host's time for a step, which is what limits a process that launches the kernels of all devices.

The kernels of a CPU hide it. On torch's CUDA build with a runtime whose kernels do nothing, a step is what the host
does and nothing else: `python -m tests.softcuda host`. On a GPU the same is measured as long as its kernels are shorter
than their launches; where there are fewer devices than stages, they have several stages each. The layers are blocks of
LayerNorm, Linear, GELU, Linear and a sum. Each pipeline's step is compared, in the same rounds, with torchgpipe's of
the same checkpointing, with the module called microbatch by microbatch without a pipeline, and with the same pipeline
in autograd. Launches are counted, not timed.

Example:
    python -m tests.softcuda host -- --save benchmarks/results/host-fake.json
    python -m tests.softcuda host -- --devices 2 --passes 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import measure, script
from benchmarks.harness.contenders import NO_TORCHGPIPE
from benchmarks.harness.measure import Row
from benchmarks.models.loop import Loop, cuts
from splitpipe import SplitPipe

Step = Callable[[], object]
MODES = "never", "except_last", "always"
#: Schedules, and how they checkpoint.
SCHEDULED = ("1f1b", "never"), ("1f1b", "always"), ("zb-h1", "never")


class Way(NamedTuple):
    """Who does a step, and how."""

    who: str
    how: str = ""
    checkpoint: Any = ""
    backward: Any = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))

    def rivals(self) -> dict[str, Way]:
        """What it is compared with."""
        ways = {"/ torchgpipe": Way("torchgpipe", "drop-in", self.checkpoint, "autograd"), "/ loop": LOOP,
                 "/ autograd": self._replace(backward="autograd")}
        if self.who == "cuts" and self.checkpoint != "never":
            ways["/ checkpointed"] = CHECKPOINTED
        if self.who == "cuts" and self.checkpoint == "never":
            ways["/ Sequential"] = self._replace(who="Sequential")
        return {} if self == LOOP else {name: way for name, way in ways.items() if way != self}


LOOP = Way("microbatch loop")
#: The same, with torch's reentrant checkpoint, the cheaper one, around each block: what that costs without a pipeline.
CHECKPOINTED = Way("microbatch loop", "torch.utils.checkpoint", "always")


class Checkpointed(nn.Module):
    """Blocks, each under torch's checkpoint."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Block(nn.Module):
    """Five ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def ways(peer: bool) -> list[Way]:
    """All of them; torchgpipe's, if it is there."""
    every = [LOOP, CHECKPOINTED]
    for who, backward in product(("Sequential", "cuts"), ("split", "autograd")):
        every += [Way(who, "drop-in", mode, backward) for mode in MODES]
        every += [Way(who, schedule, mode, backward) for schedule, mode in SCHEDULED]
    return every + [Way("torchgpipe", "drop-in", mode, "autograd") for mode in MODES] * peer


def step(way: Way, options: argparse.Namespace, count: int) -> Step:
    """Forward and backward of a batch.

    Args:
        way: who does it, and how.
        options: of the command line.
        count: of devices.
    """
    there = 1 if options.kind == "cpu" else torch.get_device_module(options.kind).device_count()
    devices = [options.kind if options.kind == "cpu" else f"{options.kind}:{index % there}" for index in range(count)]
    blocks = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)])
    x = torch.randn(options.batch, options.width, device=devices[0])
    if way == LOOP:
        return partial(looped, blocks.to(devices[0]), x, options.chunks)
    if way == CHECKPOINTED:
        return partial(looped, Checkpointed(blocks).to(devices[0]), x, options.chunks)
    balance = [options.blocks // count] * count
    shared: dict[str, Any] = {"devices": devices, "chunks": options.chunks, "checkpoint": way.checkpoint}
    target = x.to(devices[-1])
    if way.who == "torchgpipe":
        from torchgpipe import GPipe

        return partial(dropin, GPipe(blocks, balance, **shared), x, target)
    shared["backward"] = way.backward
    if way.how != "drop-in":
        shared |= {"schedule": way.how, "loss_fn": F.mse_loss}
    if way.who == "cuts":
        model = SplitPipe(Loop(blocks), cuts=cuts(balance), **shared)
    else:
        model = SplitPipe(blocks, balance, **shared)
    return partial(dropin if way.how == "drop-in" else scheduled, model, x, target)


def looped(model: nn.Module, x: Tensor, chunks: int) -> None:
    """The module itself, called microbatch by microbatch."""
    model.zero_grad()
    for part in x.chunk(chunks):
        (F.mse_loss(model(part), part) / chunks).backward()


def dropin(model: nn.Module, x: Tensor, target: Tensor) -> None:
    """With the loss outside."""
    model.zero_grad()
    F.mse_loss(model(x), target).backward()


def scheduled(model: nn.Module, x: Tensor, target: Tensor) -> None:
    """With the loss inside."""
    model.zero_grad()
    model(x, target=target).backward()


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
        runs = {str(way): step(way, options, count) for way in ways(peer)}
        timings = measure.interleaved(runs, options.passes, warm_up=2)
        for way in ways(peer):
            its = timings[str(way)]
            rows.append({
                "devices": count, **way._asdict(), "ms": 1e3 * min(its.wall), "median": 1e3 * its.median,
                "processor, ms": 1e3 * min(its.cpu), "launches": counted(runs[str(way)]),
                **{what: min(its.wall) / min(timings[str(rival)].wall)
                   for what, rival in way.rivals().items() if str(rival) in timings},
            })
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
    environment = script.environment([] if peer else [NO_TORCHGPIPE], ["torchgpipe"] * peer)
    return script.finish(options, environment, {"host": cost(options, peer)})


if __name__ == "__main__":
    script.run(main)
