"""Step time against the number of microbatches: a GPT on two devices, by splitpipe, torchgpipe and no pipeline.

All take turns in one process, each with a model of its own for each number of microbatches.

Example:
    python -m benchmarks.parts.scaling --save benchmarks/results/scaling-cpu.json
    python -m benchmarks.parts.scaling --preset small --chunks 4 8 --passes 11
    python -m benchmarks.parts.scaling --device cuda --save cuda-results/scaling-cuda.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.harness import contenders, measure, script
from benchmarks.harness.contenders import Contender
from benchmarks.harness.measure import Row, quartiles, spread
from benchmarks.harness.subject import Subject
from benchmarks.parts.compute import agreed, strayed
from splitpipe import schedule

STAGES = 2


@dataclass(frozen=True)
class Run:
    """A contender with its number of microbatches, 0 without a pipeline; ``losses`` are those of its steps."""

    contender: Contender
    chunks: int
    step: Callable[[], None]
    losses: list[float]

    @property
    def name(self) -> str:
        """Among all."""
        return f"{self.contender.name}, {self.chunks}"


def runs(subject: Subject, chunks: Sequence[int]) -> tuple[list[Run], list[str]]:
    """All that can run there, and who is left out and why."""
    pipelines = [*contenders.drop_ins(), *contenders.by_schedule(("1f1b", "zb-h1"))]
    reasons = {each.package: each.missing(subject) for each in pipelines}
    whole = Contender("unwrapped", "whole batch", "bound", contenders.unwrapped)
    alone = [whole, replace(whole, threads=2)] if subject.device == "cpu" else [whole]
    cases = [(each, number) for each in pipelines if not reasons[each.package] for number in chunks]
    every = [run(each, number, subject) for each, number in [*cases, *((each, 0) for each in alone)]]
    return every, [f"{package}: {why}" for package, why in reasons.items() if why]


def run(contender: Contender, chunks: int, subject: Subject) -> Run:
    """A contender with its model."""
    losses = list[float]()
    noting = contenders.noting(contender.start(replace(subject, chunks=max(1, chunks))), losses)

    def step() -> None:
        torch.set_num_threads(contender.threads)
        noting()

    return Run(contender, chunks, step, losses)


def chunked(who: Sequence[Run], walls: Mapping[str, Sequence[float]]) -> list[Row]:
    """The table ``chunks``.

    Args:
        who: in the order of the table.
        walls: seconds of each round, by the runs' names.
    """
    rows = []
    alone = next(each for each in who if not each.chunks)
    fewest = min(each.chunks for each in who if each.chunks)
    for each in who:
        its, order = walls[each.name], each.contender.way
        row: Row = {
            "contender": each.contender.name,
            "chunks": each.chunks or "",
            **spread("step, ms", [1e3 * wall for wall in its]),
            f"/ {alone.contender.name}": measure.ratio(its, walls[alone.name]),
        }
        if each.chunks:
            row[f"/ chunks={fewest}"] = measure.ratio(its, walls[f"{each.contender.name}, {fewest}"])
        if order in schedule.names():
            spans = [schedule.simulate(schedule.build(order, STAGES, m)).makespan / m for m in (each.chunks, fewest)]
            row[f"its schedule's / chunks={fewest}"] = spans[0] / spans[1]
        rows.append(row)
    return rows


def best(who: Sequence[Run], walls: Mapping[str, Sequence[float]]) -> list[Row]:
    """The table ``best chunks``: a pipeline's best number of microbatches, and what each one beyond it costs.

    Args:
        who: runs of all numbers.
        walls: seconds of each round, by the runs' names.
    """
    rows = []
    for name in dict.fromkeys(each.contender.name for each in who if each.chunks):
        its = {each.chunks: walls[each.name] for each in who if each.contender.name == name}
        number = min(its, key=lambda chunks: statistics.median(its[chunks]))
        middle, _, high = quartiles(its[number])
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


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("scaling", __doc__)
    script.sizes(parser, preset="quick")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="microbatches")
    parser.add_argument("--passes", type=int, default=4, help="timed rounds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code, 1 if losses differ."""
    options = make_parser().parse_args(argv)
    subject = Subject("gpt", options.preset, 1, options.device)
    who, left_out = runs(subject, sorted({*options.chunks}))
    environment = script.environment(left_out, {each.contender.package for each in who}, preset=options.preset)
    timings = measure.interleaved({each.name: each.step for each in who}, options.passes, warm_up=1)
    walls = {name: its.wall for name, its in timings.items()}
    losses = {each.name: each.losses for each in who}
    faults = strayed(losses, subject.close)
    print(*(faults or [agreed(losses, subject.close)]), sep="\n", flush=True)
    tables = {"chunks": chunked(who, walls), "best chunks": best(who, walls)}
    return script.finish(options, environment, tables, bool(faults))


if __name__ == "__main__":
    script.run(main)
