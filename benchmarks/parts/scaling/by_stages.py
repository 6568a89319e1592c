"""Step time against the number of stages: one model of fixed work, on ever more emulated devices.

A pipeline's layers sleep for their share of the work in F, B and W, so two cores stand for eight devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import measure
from benchmarks.harness.measure import Row, spread
from benchmarks.parts.emulated.layers import WIDTH, Layer, Naps, Took, ideal, measured, stepping
from benchmarks.parts.emulated.runner import Runner
from splitpipe import SplitPipe, schedule
from splitpipe.schedule import Costs

WARM_UP = 1  # rounds


def scheduled(counts: Sequence[int], names: Sequence[str], each: int, work: float, passes: int) -> list[Row]:
    """The table ``stages``.

    Args:
        counts: of devices; one device alone is always measured, too.
        names: of schedules.
        each: microbatches for each device.
        work: seconds that all devices together sleep in a step.
        passes: rounds that are timed.
    """
    runners = []
    for count in sorted({1, *counts}):
        chunks = each * count
        seconds = work / (3 * chunks * count)  # F, B and W of each microbatch on each device
        for name in names if count > 1 else ["1f1b"]:  # One device has nothing to wait for, whatever the order.
            plan = schedule.build(name, count, chunks)
            runners.append((Runner(name if count > 1 else "one device", plan, stepping(plan, seconds)), seconds))
    measure.interleaved({str(key): it.run for key, (it, _) in enumerate(runners)}, passes, WARM_UP)
    for it, _ in runners:
        del it.runs[:WARM_UP]
    return [row(it, seconds, runners[0][0].walls, work) for it, seconds in runners]


def row(it: Runner, seconds: float, alone: Sequence[float], work: float) -> Row:
    """A line of ``stages``.

    Args:
        it: has run.
        seconds: of a whole device's op.
        alone: of each round on one device.
        work: seconds that all devices together sleep in a step.
    """
    plan = it.plan
    ideal_time = ideal(plan, Costs(seconds, seconds, seconds))
    slept = [ideal(plan, measured(took.naps, plan.stages // plan.devices)) for took in it.runs]
    return {
        "schedule": it.name,
        "devices": plan.devices,
        "chunks": plan.microbatches,
        "op, ms": 1e3 * seconds,
        **spread("step, ms", [1e3 * wall for wall in it.walls]),
        **spread("speed-up", [one / wall for one, wall in zip(alone, it.walls)]),
        "ideal": work / ideal_time,
        "speed-up / ideal": measure.ratio(alone, it.walls) * ideal_time / work,
        "wall / ideal of measured sleeps": measure.ratio(it.walls, slept),
    }


def dropin(count: int, chunks: int, work: float, passes: int, torchgpipe: bool) -> list[Row]:
    """The table ``drop-in``: how many devices work at a time, in pipelines whose backward is autograd's own.

    Args:
        count: of devices.
        chunks: microbatches.
        work: seconds that all devices together sleep in a step.
        passes: rounds that are timed.
        torchgpipe: whether it is there.
    """
    seconds, wraps = work / (3 * chunks * count), ["splitpipe, split", "splitpipe, autograd"]
    wraps += ["torchgpipe"] * torchgpipe
    runners = {}
    for name in wraps:
        naps = Naps()
        layers = nn.Sequential(*[Layer(stage, seconds, naps) for stage in range(count)])
        runners[name] = _Stepper(_wrapped(name, layers, count, chunks), naps, chunks)
    measure.interleaved({name: it.run for name, it in runners.items()}, passes, WARM_UP)
    return [
        {
            "pipeline": name,
            "devices": count,
            "chunks": chunks,
            "devices at work in forward": statistics.median(abreast(took, "F") for took in it.runs[WARM_UP:]),
            "in backward": statistics.median(abreast(took, "BW") for took in it.runs[WARM_UP:]),
        }
        for name, it in runners.items()
    ]


def _wrapped(name: str, layers: nn.Sequential, count: int, chunks: int) -> Any:
    places: dict[str, Any] = {"devices": ["cpu"] * count, "chunks": chunks, "checkpoint": "never"}
    if name == "torchgpipe":
        from torchgpipe import GPipe

        return GPipe(layers, [1] * count, **places)
    return SplitPipe(layers, [1] * count, backward="split" if name.endswith("split") else "autograd", **places)


class _Stepper:
    """Runs steps of a drop-in pipeline, and keeps what was slept in each."""

    def __init__(self, model: Any, naps: Naps, chunks: int) -> None:
        self.runs: list[Took] = []
        self._model, self._naps = model, naps
        self._x, self._y = torch.zeros(chunks, WIDTH, requires_grad=True), torch.ones(chunks, WIDTH)

    def run(self) -> None:
        self._naps.taken.clear()
        began = time.perf_counter()
        F.mse_loss(self._model(self._x), self._y).backward()
        self.runs.append(Took(time.perf_counter() - began, [Naps([*self._naps.taken])], began))


def abreast(took: Took, kinds: str) -> float:
    """How many sleeps of those kinds went on at a time, from the first one's begin to the last one's end."""
    these = [nap for naps in took.naps for nap in naps.taken if nap.kind in kinds]
    return sum(nap.seconds for nap in these) / (max(nap.ended for nap in these) - min(nap.began for nap in these))
