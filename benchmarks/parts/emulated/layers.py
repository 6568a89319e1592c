"""Layers whose ops sleep: an op stands for a device's work, and a core has room for several of them.

The same ops in two forms. ``Layer`` is a SplitFunction. ``Parted`` is of ordinary autograd functions, for
torch.distributed.pipelining: a function of one's own runs the whole of its backward whatever autograd asks it for, so
there each part of backward is a function of its own, and the sum that joins them is one of torch's.

    x ──> Pass(F, B) ──> + ──> y          B runs where the gradient of x is asked for,
    weight ──> Pass(W) ──^                W where that of the weight is
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from splitpipe import SplitFunction, SplitPipe
from splitpipe.schedule import Costs, Schedule, simulate

KINDS = ("F", "B", "W")
WIDTH = 4  # of the tensors: too little to take time


class Nap(NamedTuple):
    """A sleep: a pass, "F", "B" or "W", of a stage, and the clock before and after it, in seconds."""

    kind: str
    stage: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """A bit more than it was told."""
        return self.ended - self.began


@dataclass
class Naps:
    """The sleeps of a step. Written by all threads.

    Example:
        >>> naps = Naps()
        >>> naps.take("F", 0, 0.001)
        >>> naps.count(), 0.001 <= naps.mean("F")
        ({'F': 1}, True)
    """

    taken: list[Nap] = field(default_factory=list)

    def take(self, kind: str, stage: int, seconds: float) -> None:
        """Sleeps, and notes it. For 0 seconds it does not sleep at all."""
        began = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        self.taken.append(Nap(kind, stage, began, time.perf_counter()))

    def count(self) -> dict[str, int]:
        """How many there were of each kind."""
        return dict(Counter(nap.kind for nap in self.taken))

    def total(self) -> float:
        """All of them, in seconds."""
        return sum(nap.seconds for nap in self.taken)

    def mean(self, kind: str) -> float:
        """The mean of one kind, in seconds."""
        these = [nap.seconds for nap in self.taken if nap.kind == kind]
        return sum(these) / len(these)


class Took(NamedTuple):
    """A step: its seconds, the sleeps of each process in it, and the clock when it began."""

    wall: float
    naps: list[Naps]
    began: float = 0.0


Step = Callable[[], Took]


class Napping(SplitFunction):
    """x + weight, each pass of which takes the time it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        ctx.sleep = options["sleep"]
        ctx.sleep("F")
        (weight,) = weights
        assert weight is not None
        return x + weight

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.sleep("B")
        return grad_output

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor]:
        ctx.sleep("W")
        return (grad_output.sum(0),)


class Layer(nn.Module):
    """A stage's share of the work.

    Args:
        stage: its number.
        seconds: that F, B and W of one microbatch take, each.
        naps: where they are noted.
    """

    def __init__(self, stage: int, seconds: float, naps: Naps) -> None:
        super().__init__()
        self.stage, self.seconds, self.naps = stage, seconds, naps
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def sleep(self, kind: str) -> None:
        """Takes the time of a pass."""
        self.naps.take(kind, self.stage, self.seconds)

    def forward(self, x: Tensor) -> Tensor:
        return Napping.apply(x, self.weight, sleep=self.sleep)


class Parted(Layer):
    """The same for torch.distributed.pipelining."""

    def __init__(self, stage: int, seconds: float, naps: Naps) -> None:
        super().__init__(stage, seconds, naps)
        # B runs in the first stage, too, whose input needs no gradient: a stage is more than its first layer.
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Pass.apply(x, self.anchor, "F", "B", self)
        return y + _Pass.apply(self.weight, None, "", "W", self)


class _Pass(Function):
    """Hands its input on; sleeps before, and in backward, if the pass has a name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, before: str, after: str, layer: Layer) -> Tensor:
        ctx.after, ctx.layer = after, layer
        if before:
            layer.sleep(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.sleep(ctx.after)
        return grad, None, None, None, None


def stepping(plan: Schedule, seconds: float) -> Step:
    """A function that runs a step of splitpipe's: forward with the loss, and backward, as a training loop calls them.

    Args:
        plan: to be run.
        seconds: of a whole device's op.
    """
    naps = Naps()
    layers = [Layer(stage, seconds / share, naps) for stage, share in enumerate(plan.shares)]
    model = SplitPipe(
        nn.Sequential(*layers), balance=[1] * plan.stages, devices=["cpu"] * plan.devices, chunks=plan.microbatches,
        schedule=plan, loss_fn=F.mse_loss, checkpoint="never",
    )
    x, y = torch.zeros(plan.microbatches, WIDTH, requires_grad=True), torch.ones(plan.microbatches, WIDTH)

    def step() -> Took:
        model.zero_grad()
        x.grad = None
        naps.taken.clear()
        began = time.perf_counter()
        model(x, target=y).backward()
        return Took(time.perf_counter() - began, [naps], began)

    return step


def unwrapped(chunks: int, seconds: float) -> Step:
    """The same of one layer without a pipeline, a microbatch after the other: what torch itself takes."""
    naps = Naps()
    layer = Layer(0, seconds, naps)
    inputs = [x.requires_grad_() for x in torch.zeros(chunks, 1, WIDTH)]
    target = torch.ones(1, WIDTH)

    def step() -> Took:
        naps.taken.clear()
        began = time.perf_counter()
        for x in inputs:
            (F.mse_loss(layer(x), target) / chunks).backward()
        return Took(time.perf_counter() - began, [naps], began)

    return step


def measured(naps: Iterable[Naps], stages: int) -> Costs:
    """Seconds that a whole device takes for F, B and W of a microbatch: the means.

    Args:
        naps: of a step, one a process.
        stages: on each device.
    """
    step = Naps([nap for each in naps for nap in each.taken])
    return Costs(*(stages * step.mean(kind) for kind in KINDS))


def ideal(schedule: Schedule, costs: Costs, late: bool = False) -> float:
    """The time that a schedule takes if nothing but its ops takes time.

    Args:
        schedule: that is played.
        costs: of a whole device, one number each.
        late: whether the first stage computes B with W: torch.distributed.pipelining skips it there until then.

    Example:
        >>> from splitpipe.schedule import build
        >>> ideal(build("1f1b", 2, 2), Costs()), ideal(build("zb-h1", 2, 2), Costs()), ideal(build("zb-h1", 2, 2),
        ...     Costs(), late=True)
        (9.0, 7.0, 7.0)
    """
    if late:
        times = costs.times(schedule)
        times["B"][0], times["W"][0] = 0.0, times["BW"][0]
        costs = Costs(times["F"], times["B"], times["W"])
    return simulate(schedule, costs).makespan
