"""What the tests on GPUs are made of: a pipeline beside its module, late layers, memory that is used again.

All is in doubles: rounding, which a GPU may do in another order each time, is in the last digits then. Layers spin
before they give what they compute (``Slow``), so that whoever does not wait for it reads something else.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.core import stream

WIDTH = 64
#: Cycles that a GPU spins, a quarter of a millisecond or so: the host is far ahead after them.
CYCLES = 400_000


class Slow(nn.Module):
    """The tensor, late: forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = late(x)
        if y.requires_grad:
            y.register_hook(late)
        return y


class Hungry(nn.Module):
    """The tensor; asks for more memory than there is where it is told to: forward, backward, or nowhere."""

    at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "forward":
            too_much(x)
        if self.at == "backward" and x.requires_grad:
            x = x * 1
            x.register_hook(too_much)
        return x


def late(x: Tensor) -> Tensor:
    """A copy, which the stream that the tensor's device works on makes after a while."""
    if x.is_cuda:
        torch.cuda._sleep(CYCLES)
    return x.clone()


def too_much(x: Tensor) -> None:
    x.new_empty(2**50)


@contextmanager
def exact() -> Iterator[None]:
    """Doubles by default, which have no TF32 either."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def slow(stages: int, *more: Callable[[], nn.Module]) -> nn.Sequential:
    """A product, a wait and an activation in each stage."""
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *(make() for make in more), Slow(), nn.Tanh()) for _ in range(stages)
    ))


def wrapped(module: nn.Sequential, devices: int, schedule: str | None = None, part: Any = torch.device,
            **options: Any) -> SplitPipe:
    """A pipeline of a stage a layer, on so many devices in turn, or on streams of them: of that class."""
    rows = len(module) // 2 if schedule == "zb-v" else len(module)
    places = [torch.device("cuda", number % devices) for number in range(rows)]
    if part is not torch.device:
        places = [part(device=place) for place in places]
    more = {} if schedule is None else {"schedule": schedule, "loss_fn": squared}
    return SplitPipe(module, [1] * len(module), devices=places, **{"chunks": 4, **more, **options})


def squared(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference."""
    return (output - target).square().mean()


def loss_of(model: nn.Module, x: Tensor, y: Tensor, schedule: str | None = None) -> Tensor:
    """The mean squared difference, inside of a scheduled pipeline or outside."""
    output: Tensor = model(x, target=y) if isinstance(model, SplitPipe) and schedule else model(x)
    return output if output.dim() == 0 else squared(output, y.to(output.device))


@contextmanager
def callers(devices: int) -> Iterator[list[stream.Stream]]:
    """The caller on streams of its own; those that it had."""
    places = [torch.device("cuda", number) for number in reversed(range(devices))]  # The last one is current then.
    had, own = [stream.current(place) for place in places], [stream.new(place) for place in places]
    synchronize(devices)
    with stream.use(*own):
        try:
            yield had
        finally:
            synchronize(devices)  # Others look at what was computed there.


def synchronize(devices: int) -> None:
    for device in range(devices):
        torch.cuda.synchronize(device)


def press(devices: int) -> None:
    """Fills free memory with what is no number, for whoever reads what was never written."""
    for device in range(devices):
        for size in (WIDTH, 10 * WIDTH, WIDTH * WIDTH):
            torch.full((size,), torch.nan, device=device)


def assert_same_gradients(model: nn.Module, plain: nn.Module, what: str = "") -> None:
    """Those of both are equal but for rounding, wherever they are."""
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        where = f"{what}: the gradient of {name}"
        torch.testing.assert_close(
            one.grad, other.grad, check_device=False, msg=lambda text, where=where: f"{where}: {text}"
        )


def allocated(devices: int) -> list[int]:
    """Bytes on each device."""
    gc.collect()
    kept = []
    for device in range(devices):
        # A failed backward raises before the engine's thread of a device has let go of it. That thread is through with
        # it when it has run another one, whose own tensors, the same at each count, live until the count is made.
        x, gradient = torch.zeros((), device=device, requires_grad=True), torch.zeros((), device=device)
        kept += [x, gradient, *torch.autograd.grad(x.view_as(x), x, gradient)]
    synchronize(devices)
    return [torch.cuda.memory_allocated(device) for device in range(devices)]
