"""The cost of checkpointing: time and memory of a step in each mode, of splitpipe's two engines and of torchgpipe.

All that train a model take turns in one process, one thread each. Memory is what benchmarks.parts.memory measures.

Example:
    python -m benchmarks.parts.checkpointing --save benchmarks/results/checkpointing-cpu.json
    python -m benchmarks.parts.checkpointing --models gpt --preset small --passes 11
    python -m benchmarks.parts.checkpointing --device cuda --preset large --save cuda-results/checkpointing-cuda.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import contenders, measure, script
from benchmarks.harness.contenders import Contender
from benchmarks.harness.measure import Row, Timings, spread
from benchmarks.harness.subject import MODELS, Step, Subject
from benchmarks.parts.compute import agreed, strayed
from benchmarks.parts.memory import MODES, WHO, apart, counted, fresh

MiB = 2**20

#: Checkpoint mode and who.
Key = tuple[str, str]


@dataclass(frozen=True)
class Timed:
    """Times of the steps of one, and the losses of all of them."""

    timings: Timings
    losses: list[float]


def cases(subject: Subject, modes: Sequence[str]) -> tuple[dict[Key, Contender], list[str]]:
    """Who trains in which mode, and who is left out and why."""
    known = {(mode, who): each for mode in modes for who, each in zip(WHO, contenders.drop_ins(mode))}
    reasons = {each.package: each.missing(subject) for each in known.values()}
    here = {key: each for key, each in known.items() if not reasons[each.package]}
    return here, [f"{package}: {why}" for package, why in reasons.items() if why]


def timed(who: Mapping[Key, Contender], subject: Subject, passes: int) -> dict[Key, Timed]:
    """Lets all take a turn each round. For a fresh process."""
    torch.set_num_threads(1)
    losses: dict[Key, list[float]] = {key: [] for key in who}

    def noted(step: Step, its: list[float]) -> Callable[[], None]:
        def run() -> None:
            loss = step()
            assert loss is not None
            its.append(loss)

        return run

    steps = {key: noted(each.start(subject), losses[key]) for key, each in who.items()}
    # By name: what is interleaved has strings for keys.
    names = {", ".join(key): key for key in who}
    taken = measure.interleaved({name: steps[key] for name, key in names.items()}, passes, warm_up=1)
    return {key: Timed(taken[name], losses[key]) for name, key in names.items()}


def rows(subject: Subject, found: Mapping[Key, Timed], peaks: Mapping[Key, Mapping[str, int]]) -> list[Row]:
    """A row for each mode and each who."""
    lines: list[Row] = []
    for (mode, who), its in found.items():
        wall = its.timings.wall
        row: Row = {"model": subject.model, "checkpoint": mode, "drop-in": who}
        row.update(spread("step, ms", [1e3 * seconds for seconds in wall]))
        if plain := found.get(("never", who)):
            row["/ its never"] = measure.ratio(wall, plain.timings.wall)
        if other := found.get((mode, "torchgpipe")):
            row["/ torchgpipe"] = measure.ratio(wall, other.timings.wall)
        if (mode, who) in peaks:
            row["peak, MiB"] = sum(peaks[mode, who].values()) / MiB
        lines.append(row)
    return lines


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("checkpointing", __doc__)
    script.subjects(parser, models=list(MODELS), preset="quick")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--checkpoint", nargs="+", choices=MODES, default=list(MODES), help="modes")
    parser.add_argument("--passes", type=int, default=5, help="timed rounds")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peaks, which take processes more")
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
        found: dict[Key, Timed] = fresh(timed, who, subject, options.passes)
        asked = {} if options.no_memory else who
        peaks = dict(zip(asked, apart(counted, [(each, subject, 5) for each in asked.values()], options.device)))
        lines += rows(subject, found, peaks)
        losses = {", ".join(key): its.losses for key, its in found.items()}
        faults = strayed(losses, subject.close)
        wrong = wrong or bool(faults)
        for line in faults or [agreed(losses, subject.close)]:
            print(f"{subject.model}, {line}", flush=True)
    return script.finish(options, environment, {"checkpointing": lines}, wrong)


if __name__ == "__main__":
    script.run(main)
