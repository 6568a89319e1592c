"""The variants in virtual time: no GPU, and no noise but the order of launches, which the fake CUDA runtime logs.

A device's forward of one microbatch takes one unit of time, if all have the same share of the model; so do the
gradient of its input and that of its weights. Whatever multiplies nothing takes no time. The host takes none either:
it has launched the whole step before the devices start with it, as a host that is ahead of them does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measure import Row
from benchmarks.models.unet import unet
from benchmarks.parts.ablation.variants import Case, Training, Variant, expected, strayed
from splitpipe import schedule
from splitpipe.balance.solver import solve
from splitpipe.skip import Namespace, pop, skippable, stash
from splitpipe.skip.box import opened
from tests.devices.log import Launch, launches, softcuda
from tests.devices.replay import replay

#: Of the layers of chain and hourglass: a value of a microbatch fills whole blocks of memory.
WIDTH = 64
#: Rows of a microbatch.
ROWS = 2


@skippable(stash=["skip"])
class Down(nn.Module):
    """A linear layer whose output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
        y = self.linear(x)
        yield stash("skip", y)
        return y


@skippable(pop=["skip"])
class Up(nn.Module):
    """A linear layer to whose output something kept is added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
        kept = yield pop("skip")
        return self.linear(x) + kept


def chain(devices: int) -> nn.Sequential:
    """Two equal linear layers a device, without skips."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * devices)))


def hourglass(devices: int) -> nn.Sequential:
    """As many equal linear layers; each of the first half has a skip to its mirror image in the second."""
    spaces = [Namespace() for _ in range(devices)]
    down, up = [Down().isolate(space) for space in spaces], [Up().isolate(space) for space in reversed(spaces)]
    return nn.Sequential(*down, *up)


def _linear(layers: Callable[[int], nn.Sequential]) -> Callable[[int, int], Case]:
    def case(devices: int, chunks: int) -> Case:
        made = layers(devices)
        x, y = torch.randn(2, ROWS * chunks, WIDTH).unbind()
        return Case(made, x.requires_grad_(), y, lambda stages: solve([1] * len(made), stages))

    return case


def _unet(devices: int, chunks: int) -> Case:
    layers = unet(3, 2, 4, dropout=0.0)
    x, y = torch.randn(chunks, 3, 16, 16), torch.randn(chunks, 1, 16, 16)
    work = multiplications(layers, x[:1])
    return Case(layers, x.requires_grad_(), y, lambda stages: solve(work, stages))


def multiplications(layers: nn.Sequential, x: Tensor) -> list[float]:
    """Multiplications of each layer's forward."""
    found = []
    x = x.to("cuda:0")
    with torch.no_grad(), opened({}):
        for layer in layers.to("cuda:0"):
            softcuda.log()
            x = layer(x)
            found.append(sum(launch.multiplications for launch in launches()))
    layers.to("cpu")
    return found


#: By name; each is given a number of devices and one of microbatches.
MODELS: dict[str, Callable[[int, int], Case]] = {
    "chain": _linear(chain), "hourglass": _linear(hourglass), "unet": _unet
}


@dataclass(frozen=True)
class Taken:
    """Times and memory of one step.

    Attributes:
        makespans: when the last device was done computing, for each cost of a copy.
        busy: how long a device computes, on average.
        peaks: bytes that each device had at most, beyond those before the step.
    """

    makespans: list[float]
    busy: float
    peaks: list[int]


def take(training: Training, devices: int, copies: Sequence[float], cost: Callable[[Launch, float], float]) -> Taken:
    """Takes one step, and replays it for each cost of a copy."""
    before = [torch.cuda.memory_allocated(device) for device in range(devices)]
    for device in range(devices):
        torch.cuda.reset_peak_memory_stats(device)
    softcuda.log()
    training.step()
    peaks = [torch.cuda.max_memory_allocated(device) - before[device] for device in range(devices)]
    log = launches()
    found = [replay(log, lambda launch, copy=copy: cost(launch, copy)) for copy in copies]
    busy = sum(found[0].busy(device) for device in range(devices)) / devices
    # The last scalars on their way to whoever asked for the loss keep no device waiting.
    ends = [max(span.end for span in each.spans if span.engine == "compute") for each in found]
    return Taken(ends, busy, peaks)


def tables(
    name: str,
    variants: Sequence[Variant],
    devices: int,
    chunks: int,
    copies: Sequence[float],
    checkpoint: str,
    passes: int,
) -> tuple[dict[str, list[Row]], list[str]]:
    """A table for each cost of a copy, and what was computed wrongly.

    Args:
        name: of the model.
        variants: those that are compared.
        devices: number of them.
        chunks: microbatches.
        copies: how long it takes to copy as much as the widest value between stages has, in units of time.
        checkpoint: of SplitPipe.
        passes: steps of each variant.
    """
    torch.manual_seed(0)
    case = MODELS[name](devices, chunks)
    unit, largest = _units(case, devices, chunks)

    def cost(launch: Launch, copy: float) -> float:
        return copy * launch.bytes / largest if launch.kind == "copy" else launch.multiplications / unit

    found: dict[str, list[Row]] = {f"{name}, copies {copy:g}": [] for copy in copies}
    faults: list[str] = []
    wanted = expected(case, chunks)
    for variant in variants:
        training = Training(variant, case, [f"cuda:{device}" for device in range(devices)], chunks, checkpoint)
        faults += [f"{name}, {variant.name}: {line}" for line in strayed(case, training.results(), wanted)]
        taken = [take(training, devices, copies, cost) for _ in range(passes)]
        for number, (copy, rows) in enumerate(zip(copies, found.values())):
            spans = [each.makespans[number] for each in taken]
            median = statistics.median(spans)
            rows.append({
                "variant": variant.name,
                "makespan": median,
                "least": min(spans),
                "most": max(spans),
                "planned": _planned(variant, devices, chunks, copy) if name != "unet" and checkpoint == "never" else "",
                "computing, %": 100 * statistics.median(each.busy for each in taken) / median,
                "peak, values": statistics.median(max(each.peaks) for each in taken) / largest,
                "of all devices": statistics.median(sum(each.peaks) for each in taken) / largest,
            })
    return found, faults


def _units(case: Case, devices: int, chunks: int) -> tuple[float, float]:
    """Multiplications that take a unit of time, and the bytes of the widest value that is copied."""
    training = Training(Variant(""), case, [f"cuda:{j}" for j in range(devices)], chunks, "never")
    softcuda.log()
    with torch.no_grad():
        training.model(case.input.detach().to("cuda:0"))
    log = launches()
    work = sum(launch.multiplications for launch in log)
    return work / devices / chunks, max((launch.bytes for launch in log if launch.kind == "copy"), default=1)


def _planned(variant: Variant, devices: int, chunks: int, copy: float) -> float | str:
    """The makespan by the simulator of schedules, which knows no skips."""
    if variant.off:
        return ""
    if variant.schedule is None:
        order = schedule.build("gpipe", devices, chunks, split=variant.backward == "split")
    else:
        order = schedule.build(variant.schedule, devices, chunks)
    return schedule.simulate(order, schedule.Costs(copy=copy)).makespan
