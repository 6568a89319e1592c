"""This version of splitpipe beside another one, such as that before a change: the same training steps, in turns.

Both are measured by this version's benchmarks, in processes of their own, of which one computes at a time. Ratios are
this version's time to the other's: the median of all rounds, and that of the fastest steps.

Example:
    git worktree add ../before HEAD~20
    python -m benchmarks.parts.versions ../before
    python -m benchmarks.parts.versions ../before --models gpt --preset tiny --contenders cuts 1f1b --passes 11
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import contenders, measure, rounds, script
from benchmarks.harness.contenders import Contender
from benchmarks.harness.measure import Row
from benchmarks.harness.rounds import ROOT, Processes, Taken
from benchmarks.harness.subject import MODELS, Subject
from benchmarks.parts.compute import strayed

MiB = 2**20
#: What is compared unless other words are given.
WORDS = "drop-in", "cuts", "1f1b", "zb-h1", "zb-v"


def chosen(subject: Subject, words: Sequence[str]) -> list[Contender]:
    """splitpipe's ways that have one of the words in their names.

    Raises:
        ValueError: a word is in no name.
    """
    every = [*contenders.contenders(subject), *contenders.checkpointed()]
    own = [each for each in every if each.package == "splitpipe" and each.threads == 1]
    for word in words:
        if not any(word in each.way for each in own):
            names = "; ".join(each.way for each in own)
            raise ValueError(f"no way has {word!r} in its name: expected a part of one of these: {names}")
    fitting = [each for each in own if any(word in each.way for word in words)]
    # The others' layers have skips, which a loop over them doesn't carry.
    return [each for each in fitting if subject.model == "gpt" or "cuts" not in each.way]


def folder(into: Path, other: Path) -> Path:
    """A folder from which a process imports the other version of splitpipe, and this one's benchmarks.

    Raises:
        ValueError: there is no splitpipe in the other folder.
    """
    if not (other / "splitpipe" / "__init__.py").is_file():
        raise ValueError(f"found no splitpipe/__init__.py in {other}: expected the root of another working tree")
    (into / "splitpipe").symlink_to(other.resolve() / "splitpipe")
    (into / "benchmarks").symlink_to(ROOT / "benchmarks")
    return into


def row(subject: Subject, way: str, one: Taken, other: Taken, peaks: Mapping[str, int]) -> Row:
    """A line of the table: ``one`` is this version's."""
    line: Row = {
        "model": subject.model, "way": way, "this, ms": 1e3 * one.median, "other, ms": 1e3 * other.median,
        "this / other": measure.ratio(one.wall, other.wall), "fastest": min(one.wall) / min(other.wall),
        "processor": statistics.median(one.cpu) / statistics.median(other.cpu),
    }
    if peaks:
        line |= {f"{name}, peak, MiB": peak / MiB for name, peak in peaks.items()}
    return line


def compared(subject: Subject, ways: Sequence[Contender], root: Path, options: argparse.Namespace) -> list[Row]:
    """A model's lines.

    Raises:
        RuntimeError: losses differ.
    """
    lines: list[Row] = []
    for each in ways:
        groups = {"this": Processes(each, subject), "other": Processes(each, subject, root=root)}
        found = {name: taken for name, (taken, _) in rounds.turns(groups, options.passes).items()}
        faults = strayed({name: taken.losses for name, taken in found.items()}, subject.close)
        if faults:
            raise RuntimeError(f"{subject.model}, {each.way}: {faults[0]}")
        peaks = {} if not options.memory else {
            name: rounds.exact_peak(each, subject, root=place) for name, place in {"this": ROOT, "other": root}.items()
        }
        lines.append(row(subject, each.way, found["this"], found["other"], peaks))
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("versions", __doc__)
    parser.add_argument("other", type=Path, help="the root of a working tree that has the other version")
    script.subjects(parser, models=list(MODELS), preset="quick")
    parser.add_argument("--chunks", type=int, default=8, help="microbatches")
    parser.add_argument("--passes", type=int, default=5, help="timed rounds")
    parser.add_argument("--contenders", nargs="+", default=list(WORDS), metavar="WORD", help="ways with it in the name")
    parser.add_argument("--memory", action="store_true", help="also peaks of memory, which take processes more")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code."""
    parser = make_parser()
    options = parser.parse_args(argv)
    subjects = [Subject(model, options.preset, options.chunks, options.device) for model in options.models]
    with tempfile.TemporaryDirectory() as place:
        try:
            ways = {subject: chosen(subject, options.contenders) for subject in subjects}
            root = folder(Path(place), options.other)
        except ValueError as error:
            parser.error(str(error))
        environment = script.environment(threads=1)
        tables = {
            f"versions, {subject.model}": compared(subject, ways[subject], root, options) for subject in subjects
        }
    return script.finish(options, environment, tables)


if __name__ == "__main__":
    script.run(main)
