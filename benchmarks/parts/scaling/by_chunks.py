"""Step time against the number of microbatches: a GPT on real devices, by splitpipe, torchgpipe and no pipeline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import measure
from benchmarks.harness.device_parts import parts
from benchmarks.harness.measure import Row, quartiles, spread
from benchmarks.harness.subject import even
from benchmarks.models.gpt import gpt
from splitpipe import SplitPipe, schedule


@dataclass(frozen=True)
class Preset:
    """The sizes of the GPT and of its batch, and how far results may be apart, relatively."""

    width: int
    heads: int
    blocks: int
    context: int
    rows: int
    dtype: torch.dtype = torch.float32
    close: float = 1e-4


PRESETS = {
    "tiny": Preset(8, 2, 4, 4, 32),
    "small": Preset(256, 4, 4, 128, 32),
    "large": Preset(1024, 16, 24, 1024, 32, torch.bfloat16, 5e-2),
}

#: Loss of a batch, from input and target.
Compute = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to train the model.

    Attributes:
        name: in the tables.
        make: cuts the layers for balance, devices and number of microbatches; None: the module as it is.
        schedule: by its name, if it has one that can be simulated.
        threads: intra-op threads, on the CPU.
    """

    name: str
    make: Callable[[nn.Sequential, list[int], list[Any], int], Compute] | None = None
    schedule: str | None = None
    threads: int = 1


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all bytes of a batch, or of a microbatch."""
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def _dropin(
    backward: Literal["split", "autograd"], layers: nn.Sequential, balance: list[int], devices: list[Any], chunks: int
) -> Compute:
    model = SplitPipe(layers, balance, devices=devices, chunks=chunks, checkpoint="never", backward=backward)
    return lambda x, y: loss_of(model(x), y)


def _scheduled(name: str, layers: nn.Sequential, balance: list[int], devices: list[Any], chunks: int) -> Compute:
    plan = schedule.build(name, len(devices), chunks)
    model = SplitPipe(layers, balance, devices=devices, chunks=chunks, schedule=plan, loss_fn=loss_of)
    return lambda x, y: model(x, target=y)


def _torchgpipe(layers: nn.Sequential, balance: list[int], devices: list[Any], chunks: int) -> Compute:
    from torchgpipe import GPipe

    model = GPipe(layers, balance, devices=devices, chunks=chunks, checkpoint="never")
    return lambda x, y: loss_of(model(x), y)


def missing() -> str | None:
    """Why torchgpipe can't run."""
    if find_spec("torchgpipe") is None:
        return "torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
    return None


def contenders(device: str, devices: Sequence[Any]) -> tuple[list[Contender], list[str]]:
    """All that can run there, and who is left out and why."""
    found = [Contender(f"splitpipe, drop-in, {it}", partial(_dropin, it)) for it in ("split", "autograd")]
    found += [Contender(f"splitpipe, {it}", partial(_scheduled, it), it) for it in ("1f1b", "zb-h1")]
    reason = missing()
    if any(isinstance(it, torch.Stream) for it in devices):
        reason = "it takes no streams, so no parts of a GPU as devices"
    if reason is None:
        found.append(Contender("torchgpipe, GPipe", _torchgpipe))
    if device == "cpu":
        found += [Contender(f"unwrapped, {it}", threads=number) for number, it in ((1, "1 thread"), (2, "2 threads"))]
    else:
        found.append(Contender("unwrapped, one whole GPU"))
    return found, [] if reason is None else [f"torchgpipe, GPipe: {reason}"]


def places(device: str, count: int | None) -> list[Any]:
    """Devices of the stages: two threads of the CPU; the GPUs that there are, or else parts of one."""
    if device == "cpu":
        return parts(device, count or 2)
    there = torch.cuda.device_count() if device == "cuda" else 1  # "cuda:1" is that one
    count = count or (there if there > 1 else 4)
    return [f"cuda:{it}" for it in range(count)] if 1 < count <= there else parts(device, count)


@dataclass(frozen=True)
class Thing:
    """A contender with its number of microbatches, 0 without a pipeline: ``step`` is forward, loss and backward."""

    contender: Contender
    chunks: int
    layers: nn.Sequential
    step: Callable[[], float]

    @property
    def name(self) -> str:
        """Among all."""
        return f"{self.contender.name}, {self.chunks}"

    def results(self) -> tuple[float, float]:
        """The loss, and the norm of all gradients, of a step."""
        loss = self.step()
        norms = [float(p.grad.float().norm()) for p in self.layers.parameters() if p.grad is not None]
        return loss, math.hypot(*norms)


def things(it: Contender, preset: Preset, device: str, devices: list[Any], chunks: Sequence[int]) -> list[Thing]:
    """The contender with each number of microbatches; all of them share one model and one batch."""
    torch.manual_seed(0)
    blocks, count = preset.blocks, len(devices)
    with torch.device(device):
        layers = gpt(context=preset.context, width=preset.width, heads=preset.heads, layers=blocks, dropout=0.0)
        tokens = torch.randint(256, (preset.rows, preset.context + 1))
    layers.to(preset.dtype)
    if it.make is None:
        made: dict[int, Compute] = {0: lambda x, y: loss_of(layers(x), y)}
    else:
        # The blocks evenly, the embedding with the first of them, the head with the last.
        balance = even(blocks, count)
        balance[0] += 1
        balance[-1] += 1
        made = {number: it.make(layers, balance, devices, number) for number in chunks}
    first, last = (next(layers[end].parameters()).device for end in (0, -1))
    x, y = tokens[:, :-1].to(first), tokens[:, 1:].to(last)

    def step(compute: Compute) -> float:
        torch.set_num_threads(it.threads)
        try:
            layers.zero_grad()
            loss = compute(x, y)
            loss.backward()
            return loss.item()
        finally:
            torch.set_num_threads(1)

    return [Thing(it, number, layers, partial(step, compute)) for number, compute in made.items()]


def strayed(found: Mapping[str, tuple[float, float]], close: float) -> list[str]:
    """Whose loss or gradients are not those of the last: a line each."""
    *others, (name, (loss, norm)) = found.items()
    return [
        f"{other}: loss {its[0]:.6f}, gradients {its[1]:.6f}; expected {loss:.6f} and {norm:.6f}, those of {name}"
        for other, its in others
        if not (math.isclose(its[0], loss, rel_tol=close) and math.isclose(its[1], norm, rel_tol=close))
    ]


def chunked(who: Sequence[Thing], walls: Mapping[str, Sequence[float]], stages: int) -> list[Row]:
    """The table ``chunks``.

    Args:
        who: in the order of the table.
        walls: seconds of each round, by the things' names.
        stages: of the pipelines.
    """
    rows = []
    alone = next(each for each in who if not each.chunks)
    fewest = min(each.chunks for each in who if each.chunks)
    for each in who:
        its, order = walls[each.name], each.contender.schedule
        row: Row = {
            "contender": each.contender.name,
            "chunks": each.chunks or "",
            **spread("step, ms", [1e3 * wall for wall in its]),
            f"/ {alone.contender.name}": measure.ratio(its, walls[alone.name]),
        }
        if each.chunks:
            those = walls[f"{each.contender.name}, {fewest}"]
            row |= spread(f"/ chunks={fewest}", [a / b for a, b in zip(its, those)])
        if order is not None:
            spans = [schedule.simulate(schedule.build(order, stages, m)).makespan / m for m in (each.chunks, fewest)]
            row[f"its schedule's / chunks={fewest}"] = spans[0] / spans[1]
        rows.append(row)
    return rows


def best(who: Sequence[Thing], walls: Mapping[str, Sequence[float]]) -> list[Row]:
    """The table ``best chunks``: a pipeline's best number of microbatches, and what each one beyond it costs.

    Args:
        who: things of all numbers.
        walls: seconds of each round, by the things' names.
    """
    rows = []
    for name in dict.fromkeys(each.contender.name for each in who if each.chunks):
        its = {each.chunks: walls[each.name] for each in who if each.contender.name == name}
        number = min(its, key=lambda chunks: statistics.median(its[chunks]))
        middle, low, high = quartiles(its[number])
        near = [chunks for chunks in sorted(its) if quartiles(its[chunks])[1] <= high]
        row: Row = {"contender": name, "best chunks": number, "step, ms": 1e3 * middle,
                    "quartiles that meet its": ", ".join(map(str, near))}
        beyond = [chunks for chunks in sorted(its) if chunks >= number]
        if len(beyond) > 1:
            slopes = [statistics.linear_regression(beyond, times).slope for times in zip(*(its[m] for m in beyond))]
            row |= spread("us a microbatch more", [1e6 * slope for slope in slopes])
            row["% of the step"] = 100 * statistics.median(slopes) / middle
        rows.append(row)
    return rows


def measured(
    who: Sequence[Contender], size: str, chunks: Sequence[int], passes: int, device: str, devices: list[Any]
) -> dict[str, list[Row]]:
    """Both tables.

    Args:
        who: the contenders, one without a pipeline among them.
        size: of the preset.
        chunks: numbers of microbatches.
        passes: rounds that are timed.
        device: of the module without a pipeline, and where the others are built.
        devices: of the stages.

    Raises:
        ArithmeticError: losses or gradients differ.
    """
    preset = PRESETS[size]
    found = [each for it in who for each in things(it, preset, device, devices, chunks)]
    # The first step of each, which is not timed.
    faults = strayed({each.name: each.results() for each in found}, preset.close)
    if faults:
        raise ArithmeticError("\n".join(faults))
    timings = measure.interleaved({each.name: each.step for each in found}, passes, warm_up=0)
    walls = {name: its.wall for name, its in timings.items()}
    return {"chunks": chunked(found, walls, len(devices)), "best chunks": best(found, walls)}
