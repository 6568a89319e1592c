"""Throughput: four models on two devices, by splitpipe, by its peers, and without a pipeline.

Example:
    python -m benchmarks.parts.compute --save benchmarks/results/compute-cpu.json
    python -m benchmarks.parts.compute --models gpt resnet101 unet amoebanet --passes 5
    python -m benchmarks.parts.compute --device cuda --preset large --models unet --save cuda-results/unet-cuda.json
    python -m benchmarks.parts.compute --passes 3 --contenders zb-v ZBV unwrapped
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence

from benchmarks.harness import contenders, measure, rounds, script
from benchmarks.harness.contenders import Contender
from benchmarks.harness.measure import Row, spread
from benchmarks.harness.rounds import Steps
from benchmarks.harness.subject import Subject
from splitpipe import schedule

MiB = 2**20


def chosen(
    subjects: Sequence[Subject], words: Sequence[str], compiled: bool = False
) -> dict[Subject, list[Contender]]:
    """For each model, the contenders with one of the words for a name, or else in it; all, if there are no words.

    With ``compiled``, also those whose layers are compiled, before the others.

    Raises:
        ValueError: a word is in no name.
    """
    known = {
        subject: [*(contenders.compiled(subject) if compiled else ()), *contenders.contenders(subject)]
        for subject in subjects
    }
    names = dict.fromkeys(each.name for its in known.values() for each in its)
    fitting: set[str] = set() if words else {*names}
    for word in words:
        some = {word} if word in names else {name for name in names if word in name}
        if not some:
            raise ValueError(
                f"no contender has {word!r} in its name: expected a part of one of these: {'; '.join(names)}"
            )
        fitting |= some
    return {subject: [each for each in its if each.name in fitting] for subject, its in known.items()}


def present(who: Mapping[Subject, Sequence[Contender]]) -> tuple[dict[Subject, list[Contender]], list[str]]:
    """Those that can run here, and who is left out and why: a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for subject, its in who.items():
        for each in its:
            if why := each.missing(subject):
                reasons.setdefault(why, []).append(f"{subject.model}, {each.name}")
    here = {subject: [each for each in its if not each.missing(subject)] for subject, its in who.items()}
    return here, [f"{'; '.join(names)}: {why}" for why, names in reasons.items()]


def row(each: Contender, its: Steps, subject: Subject, peak: int) -> Row:
    """A contender's line of the table."""
    name = each.way.partition(",")[0]
    order = schedule.build(name, 2, subject.chunks) if name in schedule.names() else None
    return {
        "contender": each.name,
        "as": each.role,
        **spread(f"{subject.spec.unit} a second", [subject.count / wall for wall in its.wall]),
        "step, ms": its.median * 1e3,
        "fastest, ms": min(its.wall) * 1e3,
        "first step, s": its.first,
        "processor time, ms": statistics.median(its.cpu) * 1e3,
        "cores busy": measure.ratio(its.cpu, its.wall),
        "cores its schedule fills": "" if order is None else 2 * (1 - schedule.simulate(order).bubble),
        "peak, MiB (default)": peak / MiB,
        "last loss": f"{its.losses[-1]:.5f}",
    }


def strayed(losses: Mapping[str, Sequence[float]], close: float) -> list[str]:
    """A line for each contender whose losses differ from the first one's, with the first step at which they do.

    Args:
        losses: of all steps, by name.
        close: how far they may be apart, relatively.
    """
    (first, those), *others = losses.items()
    lines = []
    for name, its in others:
        pairs = list(zip(those, its, strict=True))
        step = next((step for step, (a, b) in enumerate(pairs) if not abs(a - b) <= close * abs(a)), None)
        if step is not None:
            expected, loss = pairs[step]
            lines.append(f"{name}: loss {loss:.6f} at step {step}; expected {expected:.6f}, that of {first}")
    return lines


def agreed(losses: Mapping[str, Sequence[float]], close: float) -> str:
    """A sentence for losses that agree."""
    first, *_, last = its = next(iter(losses.values()))
    fall = f"they fall from {first:.6f} to {last:.6f}"
    return f"losses: the same, to {close} of each, at all {len(its)} steps; {fall}"


def verdict(who: Sequence[Contender], steps: Mapping[str, Steps], subject: Subject) -> list[Row]:
    """The best of splitpipe against the best peer and the bound."""
    unit, count = subject.spec.unit, subject.count

    def best(these: Sequence[Contender]) -> Contender | None:
        return min(these, key=lambda each: steps[each.name].median, default=None)

    rows: list[Row] = []
    own = best([each for each in who if each.role == "own"])
    for role, words in {"peer": "the best pipelined peer", "bound": "the bound"}.items():
        other = best([each for each in who if each.role == role])
        if own and other:
            rows.append({
                "best of": "splitpipe",
                "is": own.name,
                "a second": f"{count / steps[own.name].median:.4g} {unit}",
                "against": words,
                "which is": other.name,
                "its, a second": f"{count / steps[other.name].median:.4g} {unit}",
                "ratio": measure.ratio(steps[other.name].wall, steps[own.name].wall),
                "of medians": steps[other.name].median / steps[own.name].median,
                "of minima": min(steps[other.name].wall) / min(steps[own.name].wall),
            })
    return rows


def say(row: Row) -> str:
    """A line of the verdict as a sentence."""
    judged = "at least equal" if row["ratio"] >= 1 else "SLOWER" if "peer" in row["against"] else "slower"
    other = f"{row['against']}, {row['which is']}"
    return f"{row['is']} against {other}: {row['ratio']:.3f} of its speed, {judged}"


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("compute", __doc__)
    script.subjects(parser, models=["gpt"], preset="small")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--passes", type=int, default=11, help="timed rounds")
    words = "those with one of the WORDs for a name, or else in it (all)"
    parser.add_argument("--contenders", nargs="*", default=[], metavar="WORD", help=words)
    parser.add_argument("--compiled", action="store_true", help="also with compiled layers; these come first")
    return parser


def measured(
    who: Sequence[Contender], subject: Subject, options: argparse.Namespace
) -> tuple[dict[str, list[Row]], list[str]]:
    """A model's tables, printed, and whose losses differ."""
    steps = rounds.rounds(who, subject, options.passes)
    rows = []
    for each in who:
        its, peak = steps[each.name]
        rows.append(row(each, its, subject, peak))
        print(rows[-1], file=sys.stderr, flush=True)
    best = verdict(who, {name: its for name, (its, _) in steps.items()}, subject)
    tables = {f"compute, {subject.model}": rows, f"best, {subject.model}": best}
    script.show(tables)
    print("", *map(say, best), sep="\n")
    losses = {name: its.losses for name, (its, _) in steps.items()}
    faults = strayed(losses, subject.close)
    print("\n".join(faults) if faults else agreed(losses, subject.close), flush=True)
    return tables, faults


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code, 1 if losses differ."""
    parser = make_parser()
    options = parser.parse_args(argv)
    subjects = [Subject(model, options.preset, options.chunks, options.device) for model in options.models]
    try:
        who, left_out = present(chosen(subjects, options.contenders, options.compiled))
    except ValueError as error:
        parser.error(str(error))
    packages = {each.package for its in who.values() for each in its}
    environment = script.environment(left_out, packages, threads="one a process, unless its name says otherwise")

    tables: dict[str, list[Row]] = {}
    wrong = False
    for subject, its in who.items():
        if its:
            more, faults = measured(its, subject, options)
            tables.update(more)
            wrong = wrong or bool(faults)
    if options.save and not wrong:
        measure.save(options.save, environment, tables)
    return 1 if wrong else 0


if __name__ == "__main__":
    script.run(main)
