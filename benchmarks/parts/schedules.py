"""Schedules that search finds, against those with a name, the bounds, and the figures of others.

Example:
    python -m benchmarks.parts.schedules --save benchmarks/results/schedules-cpu.json
    python -m benchmarks.parts.schedules --only large --seconds 2
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
STAGES = 2  # of a device


@dataclass(frozen=True)
class Question:
    """A question to the search.

    Attributes:
        table: that it belongs to.
        name: of what is unlike in the table.
        devices: number of them.
        chunks: number of microbatches.
        costs: of the ops.
        memory: of a device, in microbatches of its share; None: no cap.
        others: the makespan of the reference search, where its figure is known.
    """

    table: str
    name: str
    devices: int
    chunks: int
    costs: Costs
    memory: float | None
    others: float | None = None


def questions() -> Iterator[Question]:
    """All questions, a table after the other."""
    for memory, idle in {2: 60, 2.5: 47.5, 3: 14, 3.5: 10.5, 4: 6}.items():
        yield Question("small", "F, B, W = 3, 4, 2", 4, 16, REAL, memory, 144 + idle)
    for memory in (2, 3, 4):
        yield Question("small", "F = B = W", 4, 8, Costs(), memory)
    yield Question("large", "F, B, W = 3, 4, 2", 4, 64, REAL, 2, 780)
    yield Question("large", "F, B, W = 3, 4, 2", 4, 64, REAL, 2.5)
    for memory in (2.5, 3, 4, 5, None):
        yield Question("large", "F, B, W = 3, 4, 2", 8, 32, REAL, memory)


def answer(question: Question, seconds: float) -> Row:
    """A line of the table."""
    row: Row = {"costs": question.name, "devices": question.devices, "chunks": question.chunks,
                "memory": "all" if question.memory is None else question.memory}
    began = time.perf_counter()
    order = schedule.search(question.devices, question.chunks, question.costs, question.memory, STAGES, seconds=seconds)
    took = time.perf_counter() - began
    timeline = schedule.simulate(order, question.costs)
    row |= {"search": f"{timeline.makespan:g}", "search, s": took}
    best, span = min(named(question), key=lambda other: other[1], default=("none fits", 0.0))
    return row | {
        "bound": f"{max(timeline.bounds.values()):g}",
        "best with a name": best,
        "its": f"{span:g}" if span else "",
        "less, %": 100 * (1 - timeline.makespan / span) if span else "",
        "reference search": "" if question.others is None else f"{question.others:g}",
    }


def named(question: Question) -> list[tuple[str, float]]:
    """Name and makespan of the schedules that fit, and have as many stages."""
    spans = []
    for name in schedule.names():
        for options in ({}, {"split": True}, {"stages_per_device": STAGES}):
            try:
                order = schedule.build(name, question.devices, question.chunks, **options)
                timeline = schedule.simulate(order, question.costs)
            except ValueError:
                continue  # No such option, or another number of stages than the costs are for.
            fits = question.memory is None or max(timeline.peak_activations) <= question.memory + 1e-9
            if fits and timeline.schedule.stages == question.devices * STAGES:
                spans.append((name + (", split" if "split" in options else ""), timeline.makespan))
    return spans


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = script.make_parser("schedules", __doc__)
    parser.add_argument("--only", choices=sorted({question.table for question in questions()}), help="one table")
    parser.add_argument("--seconds", type=float, default=10.0, help="how hard to look, as search takes it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    options = make_parser().parse_args(arguments)
    environment = script.environment()
    tables: dict[str, list[Row]] = {}
    for question in questions():
        if options.only in (None, question.table):
            tables.setdefault(question.table, []).append(answer(question, options.seconds))
    return script.finish(options, environment, tables)


if __name__ == "__main__":
    script.run(main)
