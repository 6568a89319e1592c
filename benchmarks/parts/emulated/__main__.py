"""The engine by itself, on emulated devices: ops that sleep, so that two cores stand for 2, 4 or 8 devices.

Each schedule's wall time against its own ideal, and in the same run torch.distributed.pipelining on the same ops, and
threads that do nothing but sleep.

Example:
    python -m benchmarks.parts.emulated --save benchmarks/results/emulated-cpu.json
    python -m benchmarks.parts.emulated --ops 20 --devices 4 --chunks 8 --schedules 1f1b zb-v --passes 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from benchmarks.parts.emulated import bare_threads, host, peers
from benchmarks.parts.emulated.layers import Naps, stepping
from benchmarks.parts.emulated.runner import Case, Runner
from splitpipe import schedule

WARM_UP = 1  # steps, after the first one
NOMINAL = 20  # milliseconds: from here on an op counts for as long as it was told to sleep, else for as long as it did


def runners(
    case: Case, names: Sequence[str], bares: Sequence[str], others: peers.Processes | None
) -> Iterator[Runner]:
    """All that can be run with the case's numbers.

    Args:
        case: the numbers.
        names: of schedules for splitpipe.
        bares: of schedules for bare threads.
        others: torch's, if they are to run.
    """
    for name in names:
        plan = schedule.build(name, case.devices, case.chunks)
        yield Runner(name, plan, stepping(plan, case.seconds))
    for name in bares:
        plan = schedule.build(name, case.devices, case.chunks)
        yield Runner(f"bare threads: {name}", plan, bare_threads.stepping(plan, case.seconds), "bare")
    if others is not None:
        for peer, plan in others.prepare(peers.Work(case.chunks, case.seconds)).items():
            yield Runner(f"torch: {peer}", plan, partial(others.step, peer), "torch", late=peer.splits)


def compare(case: Case, options: argparse.Namespace, others: peers.Processes | None) -> tuple[list[Row], Row]:
    """A line for each schedule, and one for the best of them."""
    print(f"{case.milliseconds:g} ms, {case.devices} devices, {case.chunks} microbatches", file=sys.stderr, flush=True)
    found = list(runners(case, options.schedules, options.bare, others))
    for runner in found:
        runner.run()  # What the first step sets up is not to disturb the others.
    measure.interleaved({runner.name: runner.run for runner in found}, options.passes, WARM_UP)
    for runner in found:
        del runner.runs[: WARM_UP + 1]
    return [runner.row(case) for runner in found], best(case, found)


def best(case: Case, found: Sequence[Runner]) -> Row:
    """The fastest schedule, the fastest peer, and the bound of two stages a device in a V."""
    bound = 3 * case.chunks + (case.devices - 1) / 2
    row: Row = {"op, ms": case.milliseconds, "devices": case.devices, "chunks": case.chunks, "bound, ops": bound}
    ours, theirs = (
        min((one for one in found if one.side == side), key=lambda one: one.wall, default=None)
        for side in ("splitpipe", "torch")
    )
    for title, one in {"best": ours, "torch's best": theirs}.items():
        if one is not None:
            ops = one.wall / case.seconds
            row |= {title: one.name, f"{title}, ops": ops, f"{title} / bound": ops / bound}
    if ours and theirs:
        row["best / torch's best"] = measure.ratio(ours.walls, theirs.walls)
    return row


def counted(milliseconds: float) -> str:
    """The column that the target is for."""
    return "wall / ideal" if milliseconds >= NOMINAL else "wall / ideal of measured sleeps"


def summaries(steps: Sequence[Row]) -> dict[str, list[Row]]:
    """For each length of an op a line a schedule, and a column for devices x microbatches."""
    tables: dict[str, dict[str, Row]] = {}
    for row in steps:
        column = counted(row["op, ms"])
        lines = tables.setdefault(f"{column}, {row['op, ms']:g} ms", {})
        line = lines.setdefault(row["schedule"], {"schedule": row["schedule"]})
        line[f"{row['devices']} x {row['chunks']}"] = row[column]
    return {title: list(lines.values()) for title, lines in tables.items()}


def targets(tables: dict[str, list[Row]]) -> list[Row]:
    """The targets, and if they are met."""
    rows: list[Row] = []

    def target(what: str, most: float, found: Sequence[tuple[float, str]]) -> None:
        if found:
            worst, where = max(found)
            rows.append({"target": what, "at most": most, "found": worst, "where": where, "met": worst <= most})

    for op, devices in dict.fromkeys((row["op, ms"], row["devices"]) for row in tables["steps"]):
        column = counted(op)
        found = [(row[column], f"{row['schedule']}, {row['chunks']} microbatches") for row in tables["steps"]
                 if (row["op, ms"], row["devices"], row["side"]) == (op, devices, "splitpipe")]
        target(f"{column}, {op:g} ms, {devices} devices", 1.04, found)
    for row in tables["best"]:
        if (row["devices"], row["chunks"]) == (4, 8) and row["op, ms"] >= NOMINAL:
            for what, most in {"best / bound": 1.05, "best / torch's best": 0.9}.items():
                found = [(row[what], row["best"])] if what in row else []
                target(f"{what}, {row['op, ms']:g} ms, 4 devices, 8 microbatches", most, found)
    for length in dict.fromkeys(row["op, ms"] for row in tables["host"]):
        found = [(row["between ops, us"], row["schedule"]) for row in tables["host"]
                 if row["op, ms"] == length and row["schedule"] != "unwrapped"]
        target(f"host, us between ops of {length} ms", 55, found)
    return rows


def sleeps(ops: Sequence[float], count: int) -> list[Row]:
    """By how much ``time.sleep`` overshoots when nothing else runs in the process."""
    rows = []
    for milliseconds in sorted({each for op in ops for each in (op, op / 2)}):
        naps = Naps()
        for _ in range(count):
            naps.take("F", 0, milliseconds / 1e3)
        rows.append({"told, ms": f"{milliseconds:g}", "slept longer, us": naps.mean("F") * 1e6 - milliseconds * 1e3})
    return rows


def measurements(options: argparse.Namespace) -> dict[str, list[Row]]:
    """All tables."""
    tables: dict[str, list[Row]] = {
        "host": host.cost(options.host_schedules, options.host_ops, options.host_chunks, options.host_passes),
        "sleeps": sleeps(options.ops, options.sleeps), "best": [], "steps": [],
    }
    for devices in options.devices:
        with peers.started(0 if options.alone else devices) as others:
            for op in options.ops:
                for chunks in sorted(set(options.chunks or (8, 2 * devices, 4 * devices))):
                    case = Case(op / 1e3, devices, chunks)
                    rows, row = compare(case, options, None if options.alone else others)
                    tables["steps"] += rows
                    tables["best"].append(row)
    return {"targets": targets(tables), **summaries(tables["steps"]), **tables}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = script.make_parser("emulated", __doc__)
    names, add = schedule.names(), parser.add_argument
    add("--ops", type=float, nargs="+", default=[20, 5], metavar="MS", help="sleep of a whole device's F, B, W")
    add("--devices", type=int, nargs="+", default=[4, 8], help="numbers of devices")
    add("--chunks", type=int, nargs="+", help="microbatches; unset: 8, and 2 and 4 for each device")
    add("--schedules", nargs="+", default=names, choices=names, metavar="NAME", help="of splitpipe's")
    add("--bare", nargs="*", default=["1f1b", "zb-h1", "zb-v"], choices=names, metavar="NAME", help="of bare threads'")
    add("--alone", action="store_true", help="without torch.distributed.pipelining")
    add("--passes", type=int, default=5, help="steps that are timed")
    add("--sleeps", type=int, default=50, help="sleeps of each length to time by themselves")
    add("--host-ops", type=float, nargs="+", default=[0, 1, 5], metavar="MS", help="sleep, for the host's cost")
    add("--host-schedules", nargs="+", default=["gpipe", "zb-h1"], choices=names, metavar="NAME", help="it is taken on")
    add("--host-chunks", type=int, default=32, help="microbatches of these")
    add("--host-passes", type=int, default=21, help="steps of these that are timed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    found = script.environment()
    return script.finish(options, found, measurements(options))


if __name__ == "__main__":
    script.run(main)
