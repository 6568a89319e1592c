"""Schedules that search finds, against those with a name, the bounds, and the figures of others.

Example:
    python -m benchmarks.parts.schedules --save benchmarks/results/schedules-cpu.json
    python -m benchmarks.parts.schedules --only unequal --seconds 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness import script
from benchmarks.harness.measure import Row
from splitpipe import schedule
from splitpipe.schedule import Costs

REAL = Costs(forward=3, backward_input=4, backward_weight=2)


@dataclass(frozen=True)
class Case:
    """A question to the search.

    Attributes:
        table: that it belongs to.
        name: of what is unlike in the table.
        devices: number of them.
        chunks: number of microbatches.
        costs: of the ops.
        memory: of a device, in microbatches of its share; None: no cap.
        others: the makespan of the reference search, where its figure is known.
        stages: on each device.
    """

    table: str
    name: str
    devices: int
    chunks: int
    costs: Costs
    memory: float | None
    others: float | None = None
    stages: int = 2


def cases() -> Iterator[Case]:
    """All questions, a table after the other."""
    for memory, idle in {2: 60, 2.5: 47.5, 3: 14, 3.5: 10.5, 4: 6}.items():
        yield Case("small", "F, B, W = 3, 4, 2", 4, 16, REAL, memory, 144 + idle)
    for memory in (2, 3, 4):
        yield Case("small", "F = B = W", 4, 8, Costs(), memory)
    yield Case("large", "F, B, W = 3, 4, 2", 4, 64, REAL, 2, 780)
    yield Case("large", "F, B, W = 3, 4, 2", 4, 64, REAL, 2.5)
    for memory in (2.5, 3, 4, 5, None):
        yield Case("large", "F, B, W = 3, 4, 2", 8, 32, REAL, memory)
    for name, costs in unequal().items():
        for memory in (2, 3, 4):
            yield Case("unequal", name, 4, 16, costs, memory)
    slow = Costs([3, 3, 6, 3], [4, 4, 8, 4], [2, 2, 4, 2])
    yield Case("unequal", "a slow stage, one a device", 4, 16, slow, 4, stages=1)


def unequal() -> dict[str, Costs]:
    """Costs of eight stages that are not alike."""
    f, b, w = [1.5] * 8, [2.0] * 8, [1.0] * 8
    return {
        "a slow stage": Costs([*f[:4], 3, *f[5:]], [*b[:4], 4, *b[5:]], [*w[:4], 2, *w[5:]]),
        "an embedding": Costs([0.5, *f[1:]], [0, *b[1:]], [1.5, *w[1:]]),
        "a heavy last stage": Costs([*f[:7], 3], [*b[:7], 4.5], [*w[:7], 2.5]),
        "all of it, and copies": Costs([0.5, *f[1:4], 2, 1.5, 1.5, 3], [0, *b[1:7], 4.5], [1.5, *w[1:7], 2.5], 0.2),
    }


def answer(case: Case, seconds: float) -> Row:
    """A line of the table."""
    row: Row = {"costs": case.name, "devices": case.devices, "chunks": case.chunks,
                "memory": "all" if case.memory is None else case.memory}
    began = time.perf_counter()
    found = schedule.search(case.devices, case.chunks, case.costs, case.memory, case.stages, seconds=seconds)
    took = time.perf_counter() - began
    timeline = schedule.simulate(found, case.costs)
    row |= {"search": f"{timeline.makespan:g}", "search, s": took}
    best, span = min(named(case), key=lambda other: other[1], default=("none fits", 0.0))
    return row | {
        "bound": f"{max(timeline.bounds.values()):g}",
        "best with a name": best,
        "its": f"{span:g}" if span else "",
        "less, %": 100 * (1 - timeline.makespan / span) if span else "",
        "reference search": "" if case.others is None else f"{case.others:g}",
    }


def named(case: Case) -> list[tuple[str, float]]:
    """Name and makespan of the schedules that fit, and have as many stages."""
    found = []
    for name in schedule.names():
        for options in ({}, {"split": True}, {"stages_per_device": case.stages}):
            try:
                timeline = schedule.simulate(schedule.build(name, case.devices, case.chunks, **options), case.costs)
            except ValueError:
                continue  # No such option, or another number of stages than the costs are for.
            fits = case.memory is None or max(timeline.peak_activations) <= case.memory + 1e-9
            if fits and timeline.schedule.stages == case.devices * case.stages:
                found.append((name + (", split" if "split" in options else ""), timeline.makespan))
    return found


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = script.make_parser("schedules", __doc__)
    parser.add_argument("--only", choices=sorted({case.table for case in cases()}), help="one table")
    parser.add_argument("--seconds", type=float, default=10.0, help="how hard to look, as search takes it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    options = make_parser().parse_args(arguments)
    found = script.environment()
    tables: dict[str, list[Row]] = {}
    for case in cases():
        if options.only in (None, case.table):
            tables.setdefault(case.table, []).append(answer(case, options.seconds))
    return script.finish(options, found, tables)


if __name__ == "__main__":
    script.run(main)
