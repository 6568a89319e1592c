"""What each knob saves of the memory of the fullest device, and what it costs of a step's time.

A small GPT is trained with Adam, in float32, first with the defaults and then with one change at a time. Memory is the
most that torch's allocator had handed out on a device in a step: weights, gradients, Adam's averages and activations.
Time is simulated, for layers whose F, B and W take equally long. It has no host time, and kernels on fewer rows don't
get slower in it.

The fake CUDA runtime is enough, since nothing is timed.

Example:
    SOFTCUDA_DEVICES=8 python -m tests.softcuda python -- -m benchmarks.parts.knobs
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import script
from benchmarks.harness.measure import Row
from benchmarks.harness.subject import even
from benchmarks.models.gpt import gpt
from splitpipe import SplitPipe, schedule

MiB = 2**20
#: What runs forward of all microbatches before backward.
DROPIN = "gpipe"


class LowRank(nn.Module):
    """A linear layer that stays as it is, and a product of two thin matrices that is added to it (LoRA)."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.up(self.down(x))
        return result


def adapted(model: nn.Module) -> None:
    """Freezes a model, and adds thin matrices to its linear layers, which are trained instead."""
    model.requires_grad_(False)
    linears = [(parent, name, child) for parent in list(model.modules()) for name, child in parent.named_children()
               if isinstance(child, nn.Linear)]
    for parent, name, child in linears:
        setattr(parent, name, LowRank(child))


@dataclass(frozen=True)
class Knobs:
    """One way to train.

    Attributes:
        devices: how many.
        chunks: microbatches.
        schedule: its name.
        checkpoint: which microbatches are checkpointed.
        lora: whether the model is frozen, except for thin matrices.
        more: other arguments of SplitPipe.
    """

    devices: int = 4
    chunks: int = 16
    schedule: str = DROPIN
    checkpoint: str = "except_last"
    lora: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def time(self) -> float:
        """The simulated time of a step, in which F of the whole batch takes 1 on all layers together."""
        split = True if self.schedule == DROPIN else None  # The weight gradients of a drop-in pipeline come last.
        order = schedule.build(self.schedule, self.devices, self.chunks, split=split)
        share = 1 / self.devices / self.chunks
        last = {"always": 0, "except_last": 1, "never": self.chunks}[self.checkpoint]
        costs = schedule.Costs(
            forward=share, backward_input=share, backward_weight=0 if self.lora else share, recompute=share,
            uncheckpointed=last,
        )
        return schedule.simulate(order, costs).makespan


#: What is changed, and the rest as by default. With a schedule, the default is to checkpoint nothing.
WAYS = {
    "the defaults": Knobs(),
    "`checkpoint=\"never\"`": Knobs(checkpoint="never"),
    "`checkpoint=\"never\"`, `stash_limit=0`": Knobs(checkpoint="never", more={"stash_limit": 0}),
    "`checkpoint=\"always\"`": Knobs(checkpoint="always"),
    "`chunks=32`": Knobs(chunks=32),
    "`schedule=\"1f1b\"`": Knobs(schedule="1f1b", checkpoint="never"),
    "`schedule=\"zb-h1\"`": Knobs(schedule="zb-h1", checkpoint="never"),
    "`schedule=\"v-half\"`": Knobs(schedule="v-half", checkpoint="never"),
    "`schedule=\"v-min\"`": Knobs(schedule="v-min", checkpoint="never"),
    "`schedule=\"v-min\"`, `chunks=32`": Knobs(schedule="v-min", checkpoint="never", chunks=32),
    "`schedule=\"1f1b\"`, `checkpoint=\"always\"`": Knobs(schedule="1f1b", checkpoint="always"),
    "`schedule=\"1f1b\"`, `checkpoint=\"always\"`, `chunks=32`": Knobs(
        schedule="1f1b", checkpoint="always", chunks=32),
    "LoRA": Knobs(lora=True),
    "eight devices": Knobs(devices=8),
}


def peaks(knobs: Knobs, options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Bytes on each device between steps, without gradients, and the most in a step."""
    torch.manual_seed(0)
    width, heads = options.width, options.width // 64
    model = gpt(context=options.context, width=width, heads=heads, layers=options.layers, dropout=0.0)
    if knobs.lora:
        adapted(model)
    stages = schedule.build(knobs.schedule, knobs.devices, knobs.chunks).stages
    first, *middle, last = even(options.layers, stages)
    loss_fn = None if knobs.schedule == DROPIN else of_tokens
    pipe = SplitPipe(
        model, [first + 1, *middle, last + 1], devices=[f"cuda:{number}" for number in range(knobs.devices)],
        chunks=knobs.chunks, schedule=knobs.schedule, checkpoint=knobs.checkpoint, loss_fn=loss_fn, **knobs.more,
    )
    optimizer = torch.optim.Adam([weight for weight in pipe.parameters() if weight.requires_grad])
    tokens = torch.randint(256, (options.rows, options.context))

    def step() -> None:
        if loss_fn:
            loss = pipe(tokens, target=tokens)
        else:
            output = pipe(tokens)
            loss = of_tokens(output, tokens.to(output.device))
            del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = [torch.cuda.memory_allocated(device) for device in range(knobs.devices)]
    for device in range(knobs.devices):
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(options.passes):
        step()
    return held, [torch.cuda.max_memory_allocated(device) for device in range(knobs.devices)]


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every token."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def row(name: str, knobs: Knobs, default: Row | None, options: argparse.Namespace) -> Row:
    """What one change does, compared with the defaults."""
    held, most = peaks(knobs, options)
    gc.collect()
    fullest = max(range(knobs.devices), key=most.__getitem__)
    cells = {
        "change": name,
        "peak, MiB": most[fullest] / MiB,
        "of that weights and Adam, MiB": held[fullest] / MiB,
        "time": knobs.time(),
    }
    before = default or cells
    for column, ratio in ("peak, MiB", "/ default"), ("time", "step, simulated / default"):
        cells[ratio] = cells[column] / before[column]
    return cells


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("knobs", __doc__)
    add = parser.add_argument
    add("--layers", type=int, default=8, help="blocks of the GPT")
    add("--width", type=int, default=256, help="of a token's vector, a multiple of 64")
    add("--context", type=int, default=128, help="tokens of a row")
    add("--rows", type=int, default=32, help="of the batch")
    add("--passes", type=int, default=2, help="steps, of which the one that takes most counts")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    devices = torch.cuda.device_count()
    if devices < Knobs().devices:
        parser.error(f"found {devices} CUDA devices; expected {Knobs().devices} or more, such as those of the fake: "
                     f"SOFTCUDA_DEVICES=8 python -m tests.softcuda python -- -m benchmarks.parts.knobs")
    left_out = [f"{name}: found {devices} devices" for name, knobs in WAYS.items() if knobs.devices > devices]
    environment = script.environment(left_out)
    rows: list[Row] = []
    for name, knobs in WAYS.items():
        if knobs.devices <= devices:
            rows.append(row(name, knobs, rows[0] if rows else None, options))
            print(f"{name}: {rows[-1]['peak, MiB']:.1f} MiB", file=sys.stderr, flush=True)
    return script.finish(options, environment, {"knobs": rows})


if __name__ == "__main__":
    script.run(main)
