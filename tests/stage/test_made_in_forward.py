"""What a stage makes in its forward (blocks, parameters, buffers, caches that grow) is recomputed as it was."""
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
from tests.helpers.twin import assert_same_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver, PerChannelMinMaxObserver


def block() -> nn.Module:
    """A block that counts, in BatchNorm; the same one every time."""
    made = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return made


def spectral() -> nn.Module:
    """A block whose output depends on what it counts."""
    made = nn.utils.spectral_norm(block()[0])  # type: ignore[index]
    for vector in (made.weight_u, made.weight_v):
        vector.copy_(torch.linspace(0.1, 1, 6))  # type: ignore[operator, arg-type]
    return made


class Asked(nn.Module):
    """Makes a block if it has none."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "block"):
            self.block = self.make()
        y: Tensor = self.block(x)
        return y


class Flagged(nn.Module):
    """Makes a block, and remembers that it has: by a flag, or by None in the place of it."""

    def __init__(self, none: bool = False) -> None:
        super().__init__()
        self.made = False
        if none:
            self.block = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            self.block = block()  # type: ignore[assignment]
            self.register_parameter("scale", nn.Parameter(torch.full((6,), 0.5)))
            self.register_buffer("table", torch.linspace(1, 2, 6))
            self.made = True
        y: Tensor = F.linear(self.block(x), torch.diag(self.scale)) * self.table  # type: ignore[misc]
        return y


class Weighted(nn.Module):
    """Makes its parameter in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.eye(6) * 0.5)
        return F.linear(x, self.weight).tanh()


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
        needed = 6 + int(x.detach().abs().sum() * 4)
        if needed > (self.length if self.flag else len(self.table)):
            self.length = needed
            self.table = torch.arange(needed) / 10
        return x * self.table[needed - 6 : needed]


class Rescaled(nn.Module):
    """A table of one size, which another takes the place of when a flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(6))
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().sum()) > self.seen:
            self.seen = float(x.detach().abs().sum())
            self.table = torch.full((6,), self.seen)
        return x * self.table


class Running(nn.Module):
    """Assigns a new mean each time, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x * self.mean


class Memory(nn.Module):
    """Keeps the rows that it has seen, the last five."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach()])[-5:]
        return x * self.rows.mean(0)


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.observer = PerChannelMinMaxObserver(ch_axis=1)

    def forward(self, x: Tensor) -> Tensor:
        self.observer(x.detach())
        return x * self.observer.max_val.clone()


def quantized() -> nn.Module:
    return FakeQuantize(
        MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric, ch_axis=1,
    )


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "a block": lambda: [Asked(block)],
    "a block that counts for its output": lambda: [Asked(spectral)],
    "behind a flag": lambda: [Flagged()],
    "in place of None": lambda: [Flagged(none=True)],
    "a parameter": lambda: [Weighted()],
    "a cache": lambda: [Rotary(buffer=True, flag=False)],
    "a cache that remembers its length": lambda: [Rotary(buffer=True, flag=True)],
    "a cache that is no buffer": lambda: [Rotary(buffer=False, flag=False)],
    "a cache that is no buffer and remembers its length": lambda: [Rotary(buffer=False, flag=True)],
    "a buffer in place of another": lambda: [Rescaled()],
    "a mean": lambda: [Running()],
    "a memory": lambda: [Memory()],
    "an observer": lambda: [Observed()],
    "fake quantization": lambda: [quantized()],
    "all at once": lambda: [
        Running(), Asked(spectral), Rotary(buffer=True, flag=True), Flagged(), Memory(), Rescaled(), quantized(),
        Running()],
}


@pytest.mark.parametrize(("schedule", "backward", "checkpoint"), [
    ("gpipe", "split", "always"), ("gpipe", "autograd", "except_last"), ("1f1b", "autograd", "always"),
    ("zb-h1", "split", "always"), ("zb-h1", "split", "except_last")])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.thorough
def test_what_a_forward_makes_is_recomputed_as_it_was(name: str, schedule: Any, backward: Any, checkpoint: Any) -> None:
    """In the first step and in later ones: losses, gradients and buffers are those of microbatches one by one."""
    dtype = torch.float32 if name in ("an observer", "fake quantization", "all at once") else torch.float64
    layers = LAYERS[name]()
    module = nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6)).to(dtype)
    torch.set_default_dtype(dtype)
    plain = copy.deepcopy(module)
    options: dict[str, Any] = {}
    if schedule != "gpipe":
        options = {"schedule": schedule, "loss_fn": lambda y, _: y.square().mean()}
    model = SplitPipe(module, [len(layers) + 1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint,
                      backward=backward, **options)
    optimizers: list[torch.optim.Optimizer] = []
    for step in range(4):
        x, y = torch.rand(6, 6) * (1 + step % 3) + torch.arange(6)[:, None], torch.zeros(6)
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


class Counting(nn.Module):
    """Makes a buffer and counts in it, in one forward."""

    made = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            self.register_buffer("count", torch.zeros(()))
            self.made = True
        count: Any = self.count
        count.add_(1)
        return x * count.clone()


def test_a_buffer_made_behind_a_flag_and_counted_in_at_once_is_an_error_until_it_is_there() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), Counting())
    model = SplitPipe(copy.deepcopy(plain), [2], devices=["cpu"], chunks=2, checkpoint="always")
    x = torch.rand(4, 6)
    with pytest.raises(RuntimeError, match="the next step finds it made"):
        model(x).sum().backward()
    model.zero_grad()
    for rows in (*x.chunk(2), *x.chunk(2)):
        plain.zero_grad()
        plain(rows)
    plain.zero_grad()
    plain[1].count.fill_(2)  # type: ignore[union-attr, operator]
    torch.cat([plain(rows) for rows in x.chunk(2)]).sum().backward()
    model(x).sum().backward()
    assert_same_tensors(model, plain)


class Sometimes(nn.Module):
    """Assigns its buffer in every second call."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            self.mean = self.mean + 1
        return x * self.mean


def test_a_buffer_assigned_by_what_recomputation_counts_too_is_an_error() -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(6, 6), Sometimes()), [2], devices=["cpu"], checkpoint="always")
    output = model(torch.rand(4, 6))
    with pytest.raises(RuntimeError, match="assigns mean in some of its runs only"):
        output.sum().backward()
    assert model[1].mean.tolist() == [1] * 6
