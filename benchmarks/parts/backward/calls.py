"""The engine's own time for a call that it catches, and for one that it does not.

Of processor time: with one thread it is what a clock shows, less what other processes take.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import measure
from benchmarks.harness.measure import Row
from splitpipe import SplitPipe

Backward = Literal["split", "autograd"]
ENGINES: tuple[Backward, ...] = "split", "autograd"


class Repeat(nn.Module):
    """Calls a function many times, and keeps how long the calls took, in seconds of processor time."""

    def __init__(self, call: Callable[[Tensor], object], times: int) -> None:
        super().__init__()
        self.call = call
        self.times = times
        self.took = 0.0

    def forward(self, x: Tensor) -> Tensor:
        began = time.thread_time()
        for _ in range(self.times):
            self.call(x)
        self.took = time.thread_time() - began
        return x.clone()


UNCAUGHT: dict[str, Callable[[Tensor], object]] = {
    "torch.relu": torch.relu,
    "Tensor.add": lambda x: x.add(x),
    "F.gelu": F.gelu,
    "F.layer_norm": lambda x: F.layer_norm(x, (8,)),
}


def caught(calls: int, passes: int) -> list[Row]:
    """A chain of tiny linear layers: split less autograd, in microseconds a call.

    Args:
        calls: length of the chain.
        passes: how often each is timed.
    """
    sorts: dict[str, Callable[[], list[nn.Module]]] = {
        "a linear layer each": lambda: [nn.Linear(4, 4) for _ in range(calls)],
        "one linear layer again and again": lambda: [nn.Linear(4, 4)] * calls,
    }
    rows = []
    for what, make in sorts.items():
        for chunks in (1, 8, 32):
            steps = {backward: _step(make(), chunks, backward) for backward in ENGINES}
            found = measure.interleaved(steps, passes)
            own = _own(found["split"].cpu, found["autograd"].cpu, calls * chunks)
            with _uncollected():
                found = measure.interleaved(steps, passes, prepare=gc.collect)
            quiet = _own(found["split"].cpu, found["autograd"].cpu, calls * chunks)
            own["without garbage collection, us (median)"] = quiet["own cost, us (median)"]
            rows.append({"calls": what, "chunks": chunks, **own})
    return rows


def uncaught(calls: int, passes: int) -> list[Row]:
    """Functions without a rule, called under the mode and without it: the difference, in microseconds a call.

    Args:
        calls: how often a function is called, each time.
        passes: how often it is timed.
    """
    rows = []
    for what, call in UNCAUGHT.items():
        layers = {backward: Repeat(call, calls) for backward in ENGINES}
        models = {
            backward: SplitPipe(nn.Sequential(nn.Linear(8, 8), layer), [2], devices=["cpu"], backward=backward)
            for backward, layer in layers.items()
        }
        took: dict[Backward, list[float]] = {backward: [] for backward in ENGINES}
        x = torch.randn(8, 8)
        for number in range(-2, passes):
            for backward, model in models.items():
                model(x)
                if number >= 0:  # The first one notes which parameters are left to autograd.
                    took[backward].append(layers[backward].took)
        rows.append({"function": what, **_own(took["split"], took["autograd"], calls)})
    return rows


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _step(layers: list[nn.Module], chunks: int, backward: Backward) -> Callable[[], None]:
    it = nn.Sequential(*layers)
    model = SplitPipe(it, [len(it)], devices=["cpu"], chunks=chunks, checkpoint="never", backward=backward)
    x = torch.randn(chunks, 4, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step


def _own(split: Sequence[float], autograd: Sequence[float], calls: int) -> Row:
    differences = sorted(a - b for a, b in zip(split, autograd, strict=True))
    return {
        "autograd, us": sorted(autograd)[len(autograd) // 2] / calls * 1e6,
        "own cost, us (median)": differences[len(differences) // 2] / calls * 1e6,
        "own cost, us (of minima)": (min(split) - min(autograd)) / calls * 1e6,
    }
