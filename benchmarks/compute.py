"""Real compute on two cores: a GPT on two CPU stages, by splitpipe, by its peers, and without a pipeline.

Example:
    python benchmarks/compute.py --save benchmarks/results/compute-cpu.json
    python benchmarks/compute.py --passes 3 --contenders zb-v ZBV unwrapped
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version

import contenders
import measure
import turns
from contenders import Contender
from measure import Row
from subject import PRESETS
from turns import Turns

from splitpipe import schedule

MiB = 2**20
#: How far losses may be apart, relatively: they are of float32, and sums over a batch or over its microbatches.
CLOSE = 1e-5


def chosen(words: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """The contenders with one of the words in their names (all, if there are no words), and who is left out and why.

    Raises:
        ValueError: a word is in no name.
    """
    known = contenders.contenders()
    for word in words:
        if not any(word in each.name for each in known):
            names = "; ".join(each.name for each in known)
            raise ValueError(f"no contender has {word!r} in its name: expected a part of one of these: {names}")
    wanted = [each for each in known if not words or any(word in each.name for word in words)]
    left_out = [f"{each.name}: {each.missing}" for each in wanted if each.missing]
    return [each for each in wanted if not each.missing], left_out


def row(each: Contender, its: Turns, peak: int, exact: int | None, tokens: int, chunks: int) -> Row:
    """A contender's line of the table."""
    order = schedule.build(each.way, 2, chunks) if each.way in schedule.names() else None
    cells: Row = {
        "contender": each.name,
        "as": each.role,
        "tokens a second": tokens / its.median,
        "step, ms": its.median * 1e3,
        "fastest, ms": min(its.wall) * 1e3,
        "processor time, ms": statistics.median(its.cpu) * 1e3,
        "cores busy": measure.ratio(its.cpu, its.wall),
        "cores its schedule fills": "" if order is None else 2 * (1 - schedule.simulate(order).bubble),
    }
    if exact is not None:
        cells["peak, MiB (exact)"] = exact / MiB
    return {**cells, "peak, MiB (default)": peak / MiB, "last loss": f"{its.losses[-1]:.5f}"}


def strayed(found: dict[str, Turns]) -> list[str]:
    """Whose losses are not those of the first: a line each, with the first step at which they differ."""
    (first, those), *others = found.items()
    lines = []
    for name, its in others:
        pairs = list(zip(those.losses, its.losses, strict=True))
        step = next((step for step, (a, b) in enumerate(pairs) if not abs(a - b) <= CLOSE * abs(a)), None)
        if step is not None:
            expected, loss = pairs[step]
            lines.append(f"{name}: loss {loss:.6f} at step {step}; expected {expected:.6f}, that of {first}")
    return lines


def verdict(who: Sequence[Contender], found: dict[str, Turns], tokens: int) -> list[Row]:
    """The best of splitpipe, with its own products and with torch's, against the best peer and the bound."""

    def best(these: Sequence[Contender]) -> Contender | None:
        return min(these, key=lambda each: found[each.name].median, default=None)

    rows: list[Row] = []
    for what, plain in {"splitpipe": False, "splitpipe, torch's products": True}.items():
        own = best([each for each in who if each.role == "own" and each.plain == plain])
        for role, words in {"peer": "the best pipelined peer", "bound": "the bound"}.items():
            other = best([each for each in who if each.role == role])
            if own and other:
                rows.append({
                    "best of": what,
                    "is": own.name,
                    "tokens a second": tokens / found[own.name].median,
                    "against": words,
                    "which is": other.name,
                    "its tokens a second": tokens / found[other.name].median,
                    "ratio": measure.ratio(found[other.name].wall, found[own.name].wall),
                    "of medians": found[other.name].median / found[own.name].median,
                    "of minima": min(found[other.name].wall) / min(found[own.name].wall),
                })
    return rows


def say(row: Row) -> str:
    """A line of the verdict as a sentence."""
    judged = "at least equal" if row["ratio"] >= 1 else "SLOWER" if "peer" in row["against"] else "slower"
    return f"{row['is']} against {row['against']}, {row['which is']}: {row['ratio']:.3f} of its speed, {judged}"


def parser() -> argparse.ArgumentParser:
    """All options."""
    it = argparse.ArgumentParser(
        "compute.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    it.add_argument("--preset", choices=sorted(PRESETS), default="small", help="sizes of the model (small)")
    it.add_argument("--chunks", type=int, default=8, help="microbatches (8)")
    it.add_argument("--passes", type=int, default=11, help="timed rounds (11)")
    words = "those with one of the WORDs in their names (all)"
    it.add_argument("--contenders", nargs="*", default=[], metavar="WORD", help=words)
    it.add_argument("--no-memory", action="store_true", help="leave out the exact peaks, which take processes more")
    it.add_argument("--save", metavar="PATH", help="where the tables go as JSON, with the environment")
    return it


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code, 1 if losses differ."""
    it = parser()
    options = it.parse_args(argv)
    try:
        who, left_out = chosen(options.contenders)
    except ValueError as error:
        it.error(str(error))
    environment = {**measure.environment(), "left_out": left_out}
    environment["threads"] = "one a process, unless its name says otherwise"
    if any(each.package == "torchgpipe" for each in who):
        environment["torchgpipe"] = version("torchgpipe")
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)

    preset, tokens = options.preset, PRESETS[options.preset].rows * PRESETS[options.preset].context
    measured = turns.rounds(who, preset, options.chunks, options.passes)
    found = {name: its for name, (its, _) in measured.items()}
    rows = []
    for each in who:
        exact = None if options.no_memory else turns.exact_peak(each, preset, options.chunks)
        rows.append(row(each, *measured[each.name], exact, tokens, options.chunks))
        print(rows[-1], file=sys.stderr, flush=True)
    tables = {"compute": rows, "best": verdict(who, found, tokens)}
    for title, lines in tables.items():
        print(f"\n{title}\n\n{measure.table(lines)}", flush=True)
    print("", *map(say, tables["best"]), sep="\n")
    faults = strayed(found)
    print("\n".join(faults) if faults else f"losses: the same, to {CLOSE} of each, at all steps")
    if options.save and not faults:
        measure.save(options.save, environment, tables)
    return 1 if faults else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
