"""Pictures of the results, as SVG: each function draws one of them from the tables of one file.

The same results give the same file. A picture keeps the name and a digest of its results, so that ``--check`` can tell,
without drawing, one that is older than they are.

Example:
    python -m benchmarks.report.figures
    python -m benchmarks.report.figures --results gpu-results --only throughput
    python -m benchmarks.report.figures --check
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.measure import Row
from benchmarks.report import plotting
from benchmarks.report.plotting import Spread, Tables, axes, bars, lines, look, spread
from splitpipe import schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "results"
DEVICES = ("cpu", "cuda", "fake")

#: What is compared in the picture of throughput: the fastest of these.
SPEEDS: dict[str, Callable[[Row], bool]] = {
    "unwrapped": lambda row: bool(row["as"] == "bound"),
    "torchgpipe": lambda row: bool(row["contender"] == "torchgpipe, GPipe"),
    "torch.distributed": lambda row: bool(row["as"] == "peer" and row["contender"].startswith("torch.distributed")),
    "splitpipe, drop-in": lambda row: bool(row["contender"].startswith("splitpipe, drop-in")),
    "splitpipe, scheduled": lambda row: bool(row["as"] == "own" and "drop-in" not in row["contender"]),
}


def throughput(figure: Figure, tables: Tables) -> None:
    """The speed of each package's best on each model, in torchgpipe's, or that of the module without a pipeline."""
    start = "compute, "
    models = {title.removeprefix(start): rows for title, rows in tables.items() if title.startswith(start)}
    peer = all(any(map(SPEEDS["torchgpipe"], rows)) for rows in models.values())
    one = "torchgpipe" if peer else "unwrapped"
    it = axes(figure, f"Speed of training, in that of {one}: more is better", "", f"times {one}")
    speeds: dict[str, list[Spread | None]] = {who: [] for who in SPEEDS}
    for rows in models.values():
        unit = next(name for name in rows[0] if name.endswith(" a second"))
        divisor = next(float(row[unit]) for row in rows if SPEEDS[one](row))
        for who, its in SPEEDS.items():
            best = max(filter(its, rows), key=lambda row: float(row[unit]), default=None)
            speeds[who].append(None if best is None else parts_of(spread(best, unit), divisor))
    bars(it, list(models), {who: its for who, its in speeds.items() if any(its)})
    it.axhline(1, color=look(one)[0], lw=1, ls="--", zorder=0)


def parts_of(its: Spread, divisor: float) -> Spread:
    """In units of another number."""
    middle, low, high = its
    return middle / divisor, low / divisor, high / divisor


def memory(figure: Figure, tables: Tables) -> None:
    """Peak memory of both engines, in torchgpipe's, with the most microbatches."""
    most = max(row["chunks"] for row in tables["memory"])
    rows = [row for row in tables["memory"] if row["chunks"] == most and "torchgpipe, MiB" in row]
    if not rows:
        raise ValueError("found no memory of torchgpipe's; expected it, to compare with; "
                         "install it and run python -m benchmarks.parts.memory")
    title = f"Peak memory of a step, in torchgpipe's: less is better ({most} microbatches)"
    it = axes(figure, title, "checkpointing and model", "times torchgpipe")
    groups = list(dict.fromkeys((row["model"], row["checkpoint"]) for row in rows))

    def ratio(engine: str, group: tuple[str, str]) -> Spread:
        # Of several devices, that which is worst off.
        its = [row for row in rows if (row["model"], row["checkpoint"]) == group]
        return max(float(row[f"{engine} / torchgpipe"]) for row in its), 0.0, 0.0

    engines = ("split", "autograd")
    ratios = {f"splitpipe, {engine}": [ratio(engine, group) for group in groups] for engine in engines}
    bars(it, [f"{mode}\n{model}" for model, mode in groups], ratios)
    it.tick_params(axis="x", labelsize=6)
    it.axhline(1, color=plotting.ORANGE, lw=1, ls="--", label="torchgpipe")
    plotting.legend(it)


def chunks(figure: Figure, tables: Tables) -> None:
    """Step time against the number of microbatches."""
    rows = tables["chunks"]
    it = axes(figure, "Time of a step against the number of microbatches: less is better", "microbatches", "ms")
    counts = sorted({row["chunks"] for row in rows if row["chunks"]})
    for name in dict.fromkeys(row["contender"] for row in rows):
        its = [row for row in rows if row["contender"] == name]
        if its[0]["chunks"]:
            lines(it, name, [row["chunks"] for row in its], [spread(row, "step, ms") for row in its])
        else:
            it.axhline(its[0]["step, ms"], color=look(name)[0], ls=look(name)[1], lw=1, label=name)
    it.set_xscale("log", base=2)
    it.set_xticks(counts, [str(count) for count in counts])
    it.minorticks_off()
    it.set_ylim(0)
    it.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def schedules(figure: Figure, tables: Tables) -> None:
    """Makespan against memory: what search finds, and schedules with a name."""
    costs, devices, microbatches = "F, B, W = 3, 4, 2", 4, 16
    case = {"costs": costs, "devices": devices, "chunks": microbatches}
    rows = [row for row in tables["small"] if {name: row[name] for name in case} == case]
    it = axes(
        figure, "Schedules, time and memory: less of both is better",
        f"memory, in microbatches ({devices} devices, {microbatches} microbatches)", f"time of a step, {costs}", "both",
    )
    at = [float(row["memory"]) for row in rows]
    spans = [float(row["search"]) for row in rows]
    it.plot(at, [float(row["bound"]) for row in rows], ":", color=plotting.GREY, label="lower bound")
    theirs = [float(row["reference search"]) for row in rows]
    it.plot(at, theirs, "s--", color=plotting.ORANGE, label="reference search of arXiv 2405.15362", **plotting.LINE)
    it.plot(at, spans, "o-", color=plotting.BLUE, label="splitpipe.schedule.search", **plotting.LINE)
    points: dict[tuple[float, float], str] = {}
    for name in schedule.names():
        its = schedule.simulate(schedule.build(name, devices, microbatches), schedule.Costs(3, 4, 2))
        point = max(its.peak_activations), its.makespan
        points[point] = "; ".join([points[point], name] if point in points else [name])
    it.plot([x for x, _ in points], [y for _, y in points], "x", color=plotting.RED, label="schedules with a name")
    it.set_xscale("log", base=2)
    it.set_xticks([2, 3, 4, 6, 8, 12, 16], ["2", "3", "4", "6", "8", "12", "16"])
    it.minorticks_off()
    it.margins(x=0.12)
    it.legend()
    curve = [(x + part * (u - x), y + part * (v - y)) for x, y, u, v in zip(at, spans, at[1:], spans[1:])
             for part in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    plotting.label(it, points, curve)


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        part: of the benchmarks, whose results it shows.
        table: how the names start of those tables that it is of.
        draw: draws it.
    """

    part: str
    table: str
    draw: Callable[[Figure, Tables], None]


#: All pictures, by name.
PICTURES = {
    "throughput": Picture("compute", "compute, ", throughput),
    "memory": Picture("memory-peers", "memory", memory),
    "chunks": Picture("scaling", "chunks", chunks),
    "schedules": Picture("schedules", "small", schedules),
}


def there(folder: Path, names: Sequence[str]) -> dict[Path, tuple[Picture, Path]]:
    """The pictures that a folder of results gives: their files, each with the file that it shows.

    Args:
        folder: of the results.
        names: of pictures; none: all.
    """
    files = {}
    for name in names or PICTURES:
        picture = PICTURES[name]
        for device in DEVICES:
            result = folder / f"{picture.part}-{device}.json"
            tables = json.loads(result.read_text(encoding="utf-8"))["tables"] if result.is_file() else {}
            if any(title.startswith(picture.table) for title in tables):
                files[folder / f"{name}-{device}.svg"] = picture, result
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line; the exit code, 1 if a picture can't be made, or is not of the results there are."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.report.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="(benchmarks/results)")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=[], metavar="NAME",
                        help=f"some of {', '.join(PICTURES)} (all that there are results of)")
    parser.add_argument("--check", action="store_true", help="draw nothing; say which are older than their results")
    options = parser.parse_args(arguments)
    files = there(options.results, options.only)
    if options.check:
        old = [
            f"{path.name}: is not of this {result.name}; run python -m benchmarks.report.figures"
            for path, (_, result) in files.items()
            if not path.is_file() or plotting.source(result) not in path.read_text(encoding="utf-8")
        ]
        print(*old, sep="\n", end="\n" if old else "", file=sys.stderr)
        return 1 if old else 0
    if find_spec("matplotlib") is None:
        print("benchmarks.report.figures: matplotlib is not installed; expected what "
              "python -m pip install -e '.[bench]' -c constraints.txt brings", file=sys.stderr)
        return 1
    failed = False
    for path, (picture, result) in files.items():
        try:
            path.write_bytes(plotting.svg(picture.draw, result))
            print(path.name)
        except ValueError as error:
            failed = True
            print(f"{path.name}, of {result.name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
