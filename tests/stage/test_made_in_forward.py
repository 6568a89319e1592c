"""A forward that makes blocks, parameters, buffers or caches, or assigns them, has the gradients of a plain one."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.modules import module_of
from tests.helpers.twin import assert_same_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver, PerChannelMinMaxObserver

WIDTH = 4


def numbers(*shape: int, like: Tensor) -> Tensor:
    """The same numbers each time, in another tensor's dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 7 - 3) / 4).reshape(shape).to(like.dtype)


def _linear(x: Tensor) -> nn.Linear:
    made = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, dtype=x.dtype)
    with torch.no_grad():
        made.weight.copy_(numbers(WIDTH, WIDTH, like=x))
        made.bias.fill_(0.5)
    return made


class Counting(nn.Module):
    """A block that counts the rows which pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return self.layer(x)


class Making(nn.Module):
    """Makes in forward what it has not: a block, a parameter, buffers.

    Args:
        way: what it makes, and how it knows that it has.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.made = way, False
        if way == "none":
            self.block = None
        if way == "resized":
            self.register_buffer("scale", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.way}")(x)

    def _block(self, x: Tensor) -> Tensor:
        if not hasattr(self, "block"):
            self.block = Counting(_linear(x))
        return self.block(x)

    def _flag(self, x: Tensor) -> Tensor:
        if not self.made:
            self.block = _linear(x)
            self.register_parameter("weight", nn.Parameter(numbers(WIDTH, like=x)))
            self.register_buffer("shift", numbers(WIDTH, like=x))
            self.made = True
        return self.block(x) * self.weight + self.shift

    def _none(self, x: Tensor) -> Tensor:
        if self.block is None:
            self.block = nn.Sequential(_linear(x), nn.Tanh())
        return self.block(x)

    def _parameter(self, x: Tensor) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(numbers(WIDTH, WIDTH, like=x))
        return F.linear(x, self.weight)

    def _resized(self, x: Tensor) -> Tensor:
        if not self.scale.numel():
            self.scale.resize_(WIDTH).copy_(numbers(WIDTH, like=x))
        # Saved as it is, what another microbatch's recomputation writes again would be an error.
        return x * self.scale.to(x.dtype, copy=True)


class Spectral(nn.Module):
    """Makes a block whose output depends on what it counts, if it has none."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "block"):
            made = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH).to(x.dtype))
            with torch.no_grad():
                for each in (*made.parameters(), *made.buffers()):
                    each.copy_(numbers(*each.shape, like=each) + 0.1)
            self.block = made
        return self.block(x)  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """A table that grows with what comes, during a step too: as a buffer or not, by its length or a flag."""

    def __init__(self, buffer: bool, flag: bool) -> None:
        super().__init__()
        self.flag, self.length = flag, 0
        if buffer:
            self.register_buffer("table", torch.zeros(0))
        else:
            self.table = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        needed = WIDTH + int(x.detach().abs().sum() * 4)
        if needed > (self.length if self.flag else len(self.table)):
            self.length = needed
            self.table = torch.arange(needed) / 10
        return x * self.table[needed - WIDTH : needed]


class Assigning(nn.Module):
    """Assigns its buffer in forward, and uses what a function makes of the old one and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(*shape, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.function(self.kept, x.detach())
        return x * (self.kept.mean(0) if self.kept.dim() > 1 else self.kept)


class Rescaled(nn.Module):
    """A table of one size, which another takes the place of when a number says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().sum()) > self.seen:
            self.seen = float(x.detach().abs().sum())
            self.table = torch.full((WIDTH,), self.seen)
        return x * self.table


class Counted(nn.Module):
    """Makes a buffer and counts rows in it: by its name, or by a flag, which a second run finds set."""

    made = False

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.flag = flag

    def forward(self, x: Tensor) -> Tensor:
        if not (self.made if self.flag else hasattr(self, "rows")):
            self.register_buffer("rows", torch.zeros(()))
            self.made = True
        self.rows += len(x)
        return x * (self.rows.clone() if self.flag else 1)


class Second(nn.Module):
    """Makes its buffer in the second run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 2:
            self.kept = torch.full((WIDTH,), 3.0)
        return x * 2 if self.kept is None else x * self.kept


def observed(self: Any, x: Tensor) -> Tensor:
    self.observer(x.detach())
    return x * self.observer.max_val.clone()  # type: ignore[no-any-return]


def quantized() -> nn.Module:
    return FakeQuantize(
        MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric, ch_axis=1,
    )


def mean() -> nn.Module:
    return Assigning(lambda old, x: 0.5 * old + 0.5 * x.mean(0))


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    **{way: lambda way=way: [Making(way)] for way in ("block", "flag", "none", "parameter", "resized")},
    "a block that counts for its output": lambda: [Spectral()],
    "a cache": lambda: [Rotary(buffer=True, flag=False)],
    "a cache that remembers its length": lambda: [Rotary(buffer=True, flag=True)],
    "a cache that is no buffer": lambda: [Rotary(buffer=False, flag=False)],
    "a cache that is no buffer and remembers its length": lambda: [Rotary(buffer=False, flag=True)],
    "a buffer in place of another": lambda: [Rescaled()],
    "a mean": lambda: [mean()],
    "the last five rows": lambda: [Assigning(lambda old, x: torch.cat([old, x])[-5:], 1)],
    "a count": lambda: [Counted(flag=False)],
    "a buffer that the second run makes": lambda: [Second()],
    "a count behind a flag": lambda: [Counted(flag=True)],
    "an observer": lambda: [module_of(observed, observer=PerChannelMinMaxObserver(ch_axis=1))],
    "fake quantization": lambda: [quantized()],
    "all at once": lambda: [
        mean(), Spectral(), Rotary(buffer=True, flag=True), nn.Tanh(), Making("flag"), Rescaled(), quantized()],
}


@pytest.mark.parametrize(("schedule", "backward", "checkpoint"), [
    ("gpipe", "split", "always"), ("gpipe", "autograd", "except_last"), ("1f1b", "autograd", "always"),
    ("zb-h1", "split", "always"), ("zb-h1", "split", "except_last")])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_through_assigned_buffers(name: str, schedule: Any, backward: Any, checkpoint: Any) -> None:
    """In the first step and in later ones: losses, gradients and buffers are those of microbatches one by one."""
    dtype = torch.float32 if name in ("an observer", "fake quantization", "all at once") else torch.float64
    torch.set_default_dtype(dtype)
    layers = LAYERS[name]()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)).to(dtype)
    plain, options = copy.deepcopy(module), dict[str, Any]()
    if schedule != "gpipe":
        options = {"schedule": schedule, "loss_fn": lambda y, _: y.square().mean()}
    model = SplitPipe(module, [len(layers) + 1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint,
                      backward=backward, **options)
    optimizers: list[torch.optim.Optimizer] = []
    for step in range(4):
        x, y = torch.rand(6, WIDTH) * (1 + step % 3) + torch.arange(6)[:, None], torch.zeros(6)
        expected = torch.stack([plain(rows).square().mean() for rows in x.chunk(3)]).mean()
        expected.backward()
        loss = model(x, target=y) if options else model(x).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert_same_tensors(model, plain)
        # Made after the first forward, they know what it has made.
        optimizers = optimizers or [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (plain, model)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_beginning_to_assign_buffers_costs_one_repeated_step_at_most(backward: Any) -> None:
    """What plain autograd saves is dropped while the forward runs, if it has never assigned anything."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rescaled())
    plain[1].seen = 20.0
    model = SplitPipe(
        copy.deepcopy(plain), [2], devices=["cpu"], chunks=2, checkpoint="always", backward=backward)
    for step in range(4):
        x = torch.rand(4, WIDTH) * 10**step
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            assert "assigned a parameter, buffer or submodule in its forward, which it hadn't done" in str(error)
            assert backward == "autograd" and step == 2
            model[1].seen = plain[1].seen
            model(x).sum().backward()
        torch.cat([plain(rows) for rows in x.chunk(2)]).sum().backward()
        assert_same_tensors(model, plain)
