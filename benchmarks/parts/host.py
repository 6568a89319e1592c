"""The host's time for a step, which is what limits a process that launches the kernels of all devices.

The kernels of a CPU hide it. On torch's CUDA build with a runtime whose kernels do nothing, a step is what the host
does and nothing else: `python -m tests.softcuda host`. On a GPU the same is measured as long as its kernels are shorter
than their launches; where there are fewer devices than stages, they have several stages each. The layers are blocks of
LayerNorm, Linear, GELU, Linear and a sum. Each pipeline's step is compared, in the same rounds, with torchgpipe's of
the same checkpointing, with the module called microbatch by microbatch without a pipeline, and with the same pipeline
in autograd. Launches are counted, not timed.

``--profile`` has py-spy, where it is installed, look a thousand times a second at who holds the interpreter's lock.

Example:
    python -m tests.softcuda host -- --save benchmarks/results/host-fake.json
    python -m tests.softcuda host -- --devices 2 --passes 3 --profile 10
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from benchmarks.models.loop import Loop, cuts
from splitpipe import SplitPipe

Step = Callable[[], object]
MODES = "never", "except_last", "always"
#: Samples a second of a profile, and how many functions get a line.
RATE, MOST = 1000, 12
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
        found = {"/ torchgpipe": Way("torchgpipe", "drop-in", self.checkpoint, "autograd"), "/ loop": LOOP,
                 "/ autograd": self._replace(backward="autograd")}
        return {} if self == LOOP else {name: way for name, way in found.items() if way != self}


LOOP = Way("microbatch loop")
#: The same, with torch's checkpoint around each block: what that costs without a pipeline.
CHECKPOINTED = Way("microbatch loop", "torch.utils.checkpoint", "always")


class Checkpointed(nn.Module):
    """Blocks, each under torch's checkpoint."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
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
    found = [LOOP, CHECKPOINTED]
    for who, backward in product(("Sequential", "cuts"), ("split", "autograd")):
        found += [Way(who, "drop-in", mode, backward) for mode in MODES]
        found += [Way(who, schedule, mode, backward) for schedule, mode in SCHEDULED]
    return found + [Way("torchgpipe", "drop-in", mode, "autograd") for mode in MODES] * peer


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
        found = measure.interleaved(runs, options.passes, warm_up=2)
        for way in ways(peer):
            its = found[str(way)]
            rows.append({
                "devices": count, **way._asdict(), "ms": 1e3 * min(its.wall), "median": 1e3 * its.median,
                "processor, ms": 1e3 * min(its.cpu), "launches": counted(runs[str(way)]),
                **{what: min(its.wall) / min(found[str(rival)].wall)
                   for what, rival in way.rivals().items() if str(rival) in found},
            })
        show(rows, count)
    return rows


def show(rows: Sequence[Row], count: int) -> None:
    """Says what there is so far: it takes its time."""
    print(measure.table([row for row in rows if row["devices"] == count]), file=sys.stderr, flush=True)


def profiled(options: argparse.Namespace, tool: str) -> list[Row]:
    """Who holds the interpreter's lock while the default steps: functions, and their shares of the time.

    Args:
        options: of the command line.
        tool: the path of py-spy.
    """
    rows: list[Row] = []
    for who in ("Sequential", "cuts"):
        way = Way(who, "drop-in", "except_last", "split")
        run = step(way, options, options.devices[0])
        run()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "samples.txt")
            words = [tool, "record", "--gil", "--rate", str(RATE), "--format", "raw", "--output", str(file)]
            looker = subprocess.Popen([*words, "--duration", str(options.profile), "--pid", str(os.getpid())])
            while looker.poll() is None:
                run()
            samples = file.read_text(encoding="utf-8").splitlines()
        found = Counter[str]()
        for line in samples:
            frames, _, count = line.rpartition(" ")
            name, _, file_name = frames.rpartition(";")[2].rstrip(")").partition(" (")
            found[f"{'/'.join(Path(re.sub(r':[0-9]+$', '', file_name)).parts[-2:])}: {name}"] += int(count)
        every = RATE * options.profile
        rows.append({"devices": options.devices[0], "who": who, "function": "all", "of the time, %":
                     100 * found.total() / every})
        rows += [{"devices": options.devices[0], "who": who, "function": name, "of the time, %": 100 * count / every}
                 for name, count in found.most_common(MOST)]
    return rows


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
    parser.add_argument("--profile", type=int, default=0, metavar="SECONDS", help="of the default, for so long")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables; the exit code."""
    options = make_parser().parse_args(argv)
    torch.set_num_threads(1)
    peer = find_spec("torchgpipe") is not None
    missing = "torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
    left_out = [] if peer else [missing]
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if options.profile and tool is None:
        left_out.append("py-spy is not installed: pip install py-spy")
    environment = script.environment(left_out, ["torchgpipe"] * peer)
    tables = {"host": cost(options, peer)}
    if options.profile and tool is not None:
        tables["who holds the lock"] = profiled(options, tool)
    return script.finish(options, environment, tables)


if __name__ == "__main__":
    script.run(main)
