"""The cost of checkpointing: time of a step in each mode, of splitpipe's two engines and of torchgpipe.

All that train a model take turns in one process, one thread each. benchmarks.parts.memory has the memory.

Example:
    python -m benchmarks.parts.checkpointing --save benchmarks/results/checkpointing-cpu.json
    python -m benchmarks.parts.checkpointing --models gpt --preset small --passes 11
    python -m benchmarks.parts.checkpointing --device cuda --preset large --save cuda-results/checkpointing-cuda.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import contenders, measure, script
from benchmarks.harness.contenders import Contender
from benchmarks.harness.measure import Row, Timings, spread
from benchmarks.harness.subject import MODELS, Subject
from benchmarks.parts.compute import agreed, strayed
from benchmarks.parts.memory import MODES, WHO, fresh

#: Checkpoint mode and who.
Key = tuple[str, str]


@dataclass(frozen=True)
class Result:
    """Times of the steps of one, and the losses of all of them."""

    timings: Timings
    losses: list[float]


def cases(subject: Subject, modes: Sequence[str]) -> tuple[dict[Key, Contender], list[str]]:
    """Who trains in which mode, and who is left out and why."""
    known = {(mode, who): each for mode in modes for who, each in zip(WHO, contenders.drop_ins(mode))}
    reasons = {each.package: each.missing(subject) for each in known.values()}
    here = {key: each for key, each in known.items() if not reasons[each.package]}
    return here, [f"{package}: {why}" for package, why in reasons.items() if why]


def timed(who: Mapping[Key, Contender], subject: Subject, passes: int) -> dict[Key, Result]:
    """Lets all take a turn each round. For a fresh process."""
    torch.set_num_threads(1)
    losses: dict[Key, list[float]] = {key: [] for key in who}
    steps = {key: contenders.noting(each.start(subject), losses[key]) for key, each in who.items()}
    # By name: what is interleaved has strings for keys.
    names = {", ".join(key): key for key in who}
    timings = measure.interleaved({name: steps[key] for name, key in names.items()}, passes, warm_up=1)
    return {key: Result(timings[name], losses[key]) for name, key in names.items()}


def rows(subject: Subject, runs: Mapping[Key, Result]) -> list[Row]:
    """A row for each mode and each who."""
    lines: list[Row] = []
    for (mode, who), its in runs.items():
        wall = its.timings.wall
        row: Row = {"model": subject.model, "checkpoint": mode, "drop-in": who}
        row.update(spread("step, ms", [1e3 * seconds for seconds in wall]))
        if plain := runs.get(("never", who)):
            row["/ its never"] = measure.ratio(wall, plain.timings.wall)
        if other := runs.get((mode, "torchgpipe")):
            row["/ torchgpipe"] = measure.ratio(wall, other.timings.wall)
        lines.append(row)
    return lines


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("checkpointing", __doc__)
    script.subjects(parser, models=list(MODELS), preset="quick")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--checkpoint", nargs="+", choices=MODES, default=list(MODES), help="modes")
    parser.add_argument("--passes", type=int, default=5, help="timed rounds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code, 1 if losses differ."""
    options = make_parser().parse_args(argv)
    subjects = [Subject(model, options.preset, options.chunks, options.device) for model in options.models]
    who, left_out = cases(subjects[0], options.checkpoint)
    environment = script.environment(left_out, {each.package for each in who.values()}, threads=1)

    lines: list[Row] = []
    wrong = False
    for subject in subjects:
        runs: dict[Key, Result] = fresh(timed, who, subject, options.passes)
        lines += rows(subject, runs)
        losses = {", ".join(key): its.losses for key, its in runs.items()}
        faults = strayed(losses, subject.close)
        wrong = wrong or bool(faults)
        for line in faults or [agreed(losses, subject.close)]:
            print(f"{subject.model}, {line}", flush=True)
    return script.finish(options, environment, {"checkpointing": lines}, wrong)


if __name__ == "__main__":
    script.run(main)
