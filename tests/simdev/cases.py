"""Training on simulated devices: small modules, in every way that streams are used."""
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.skip import pop, skippable, stash

from . import Launch, forget, launches
from .hazards import hazards

WIDTH = 8
ROWS = 2
STEPS = 2


@skippable(stash=["skip"])
class Keep(nn.Module):
    """Stashes what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
        y = self.layer(x)
        yield stash("skip", y.relu())
        return y


@skippable(pop=["skip"])
class Join(nn.Module):
    """Adds what was stashed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
        kept = yield pop("skip")
        return self.layer(x) + kept * 3


class Pair(nn.Module):
    """Two tensors, one of which is a mask that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, mask = value if isinstance(value, tuple) else (value, value.detach() > 0)
        return self.layer(x) * mask, mask


class One(nn.Module):
    """Of two tensors the first, changed in place."""

    def forward(self, value: Any) -> Any:
        return value[0].relu_()


def chain(stages: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def pairs(stages: int) -> nn.Sequential:
    return nn.Sequential(*(Pair() for _ in range(stages - 1)), nn.Sequential(Pair(), One()))


def skips(stages: int) -> nn.Sequential:
    return nn.Sequential(Keep(), *(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2)), Join())


MODULES = {"chain": chain, "pairs": pairs, "skips": skips}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        module: its name.
        stages: number of them.
        chunks: microbatches.
        checkpoint: of SplitPipe.
        backward: of SplitPipe.
        schedule: its name; None: the drop-in.
        own: whether the caller is on streams of its own, not on the default ones.
        parts: whether the devices are streams, two on each device.
    """

    module: str
    stages: int
    chunks: int
    checkpoint: Any
    backward: Any
    schedule: str | None
    own: bool
    parts: bool = False

    def __str__(self) -> str:
        how = self.schedule or "drop-in"
        return (
            f"{self.module}, {self.stages} stages, {self.chunks} chunks, {self.checkpoint}, {self.backward}, {how}"
            f"{', own streams' if self.own else ''}{', parts of devices' if self.parts else ''}"
        )

    def devices(self) -> list[Any]:
        """Of SplitPipe."""
        count = self.stages // 2 if self.schedule == "zb-v" else self.stages
        if self.parts:
            return [torch.Stream(device=f"sim:{index // 2}") for index in range(count)]
        return [f"sim:{index}" for index in range(count)]


def grid(
    stages: Sequence[int] = (2, 4), chunks: Sequence[int] = (1, 3, 4), modules: Sequence[str] = tuple(MODULES)
) -> Iterator[Case]:
    """All cases with these numbers."""
    ways = product(
        modules, stages, chunks, ("never", "except_last", "always"), ("split", "autograd"),
        (None, "1f1b", "zb-h1", "zb-v"), (False, True), (False, True),
    )
    return (Case(*way) for way in ways)


def mean(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference, of ops that every device has."""
    return (output - target).square().mean()


@dataclass(frozen=True)
class Outcome:
    """What a case has shown.

    Attributes:
        hazards: in words, and how often each was found.
        log: of the last step.
        faults: parameters that differ from those of the unwrapped module.
    """

    hazards: Counter[str]
    log: list[Launch]
    faults: list[str]


def run(case: Case) -> Outcome:
    """Trains for some steps, as the unwrapped module is trained on the CPU."""
    torch.manual_seed(0)
    module = MODULES[case.module](case.stages)
    plain = copy.deepcopy(module)
    x, y = torch.randn(2, ROWS * case.chunks, WIDTH).unbind()
    scheduled: dict[str, Any] = {} if case.schedule is None else {"schedule": case.schedule, "loss_fn": mean}
    model = SplitPipe(
        module, [1] * case.stages, devices=case.devices(), chunks=case.chunks, checkpoint=case.checkpoint,
        backward=case.backward, **scheduled,
    )
    streams = [torch.Stream(device=device) for device in dict.fromkeys(model.devices)] if case.own else []
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)
        forget()
        given = x.to(model.devices[0]).requires_grad_()
        log = _steps(model, given, y.to(model.devices[-1]), case.schedule is not None)
        found = hazards(launches())
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x.requires_grad_()
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean(plain(x), y).backward()
        optimizer.step()
    faults = [
        name for (name, p), q in zip(model.named_parameters(), plain.parameters())
        if not torch.allclose(p.detach().cpu(), q, atol=1e-5)
    ]
    if given.grad is None or x.grad is None or not torch.allclose(given.grad.cpu(), x.grad, atol=1e-5):
        faults.append("the input's gradient")
    return Outcome(found, log, faults)


def _steps(model: SplitPipe, x: Tensor, y: Tensor, scheduled: bool) -> list[Launch]:
    """Trains; gives the log of the last step but for the optimizer's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        start = len(launches())
        loss = model(x, target=y) if scheduled else mean(model(x), y)
        loss.backward()
        log = launches()[start:]
        optimizer.step()
        del loss
    return log
