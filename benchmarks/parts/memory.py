"""Peak memory of a step: splitpipe beside torchgpipe, at the same number of microbatches and checkpoint mode.

Counted are the bytes of torch's tensors, beyond those that are there before the step: activations, what stages hand
on, and gradients. Of several steps, that counts which takes most. Each case runs in a process of its own.

Example:
    python -m tests.softcuda python -- -m benchmarks.parts.memory --device cuda --chunks 1 8 --passes 2 \\
        --save benchmarks/results/memory-peers-fake.json
    python -m benchmarks.parts.memory --models unet --chunks 8 --checkpoint never --schedules
    python -m benchmarks.parts.memory --device cuda --preset large --save benchmarks/results/memory-peers-cuda.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import contenders, script, tensor_memory
from benchmarks.harness.contenders import Contender
from benchmarks.harness.measure import Row
from benchmarks.harness.subject import MODELS, Subject
from splitpipe import schedule

MiB = 2**20
MODES = ("always", "except_last", "never")
#: What splitpipe may take of torchgpipe's memory.
TARGET = 1.05
#: How the tables name the drop-ins, in the order of contenders.drop_ins.
WHO = ("split", "autograd", "torchgpipe")

#: By model with its microbatches, checkpoint mode, and who: bytes by device.
Peaks = Mapping[tuple[Subject, str, str], Mapping[str, int]]


def fresh(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a new process, forked from one that has loaded torch and run nothing.

    Raises:
        RuntimeError: the call has failed, or the process has ended without an answer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "splitpipe", "torchgpipe"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, call, arguments))
    process.start()
    theirs.close()
    try:
        answer, fault = ours.recv()
    except EOFError:
        process.join()
        answer, fault = None, f"exit code {process.exitcode}"
    process.join()
    ours.close()
    if fault is not None:
        raise RuntimeError(f"{call.__name__}{arguments}: its process has failed:\n{fault}")
    return answer


def _answer(theirs: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # The profiler warns of threads that start before it ends.
    try:
        answer = call(*arguments), None
    except BaseException:
        answer = None, traceback.format_exc()
    theirs.send(answer)


def apart(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], device: str) -> list[Any]:
    """The results of calls, each in a fresh process, on the CPU as many at a time as there are cores."""
    with ThreadPoolExecutor((os.cpu_count() or 1) if device == "cpu" else 1) as pool:
        return list(pool.map(lambda its: fresh(call, *its), arguments))


def counted(contender: Contender, subject: Subject, passes: int) -> dict[str, int]:
    """The most bytes that one of so many steps takes, by device, after a first one. For a fresh process.

    Not all steps take the same: the order in which backward goes through microbatches may settle in some of them.
    """
    torch.set_num_threads(1)
    module, compute = contender.built(subject)

    def prepare() -> None:
        module.zero_grad(set_to_none=True)

    peaks = tensor_memory.peaks(compute, prepare, passes, "cpu" if subject.device == "cpu" else "cuda")
    return {place: most for place in peaks[0] if (most := max(its[place] for its in peaks))}


def cases(options: argparse.Namespace) -> dict[tuple[Subject, str, str], Contender]:
    """The cases to count. With one microbatch except_last is never, for all of them."""
    by_case: dict[tuple[Subject, str, str], Contender] = {}
    for model in options.models:
        subjects = [Subject(model, options.preset, chunks, options.device) for chunks in options.chunks]
        for subject in subjects:
            same = subject.chunks == 1 and "never" in options.checkpoint
            for mode in options.checkpoint:
                if mode == "except_last" and same:
                    continue
                by_case.update({(subject, mode, who): it for who, it in zip(WHO, contenders.drop_ins(mode))})
        its = contenders.by_schedule(tuple(options.schedules))
        by_case.update({(subjects[-1], "never", each.way): each for each in its})
    return by_case


def compared(peaks: Peaks) -> list[Row]:
    """A row for each model, number of microbatches, mode, and device if there are several."""
    rows: list[Row] = []
    for subject, mode in dict.fromkeys((subject, mode) for subject, mode, who in peaks if who in WHO):
        its = {who: peaks[subject, mode, who] for who in WHO if (subject, mode, who) in peaks}
        places = sorted({place for sizes in its.values() for place in sizes})
        for place in places:
            row: Row = {"model": subject.model, "chunks": subject.chunks, "checkpoint": mode}
            if len(places) > 1:
                row["device"] = place
            theirs = its.get("torchgpipe", {}).get(place)
            if theirs:
                row["torchgpipe, MiB"] = theirs / MiB
            for engine in ("split", "autograd"):
                own = its[engine].get(place, 0)
                row[f"{engine}, MiB"] = own / MiB
                if theirs:
                    row[f"{engine} / torchgpipe"] = own / theirs
            rows.append(row)
    return rows


def worst(rows: Sequence[Row]) -> list[Row]:
    """For each model and engine, the row where it takes most of torchgpipe's memory, and whether that is the target."""
    lines: list[Row] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for engine in ("split", "autograd"):
            ratio = f"{engine} / torchgpipe"
            its = [row for row in rows if row["model"] == model and ratio in row]
            if its:
                most = max(its, key=lambda row: row[ratio])
                lines.append({
                    "model": model,
                    "drop-in": engine,
                    "worst ratio": most[ratio],
                    "chunks": most["chunks"],
                    "checkpoint": most["checkpoint"],
                    "at most": TARGET,
                    "target": "met" if most[ratio] <= TARGET else "missed",
                })
    return lines


def say(row: Row) -> str:
    """A line of the worst as a sentence."""
    return f"{row['model']}, {row['drop-in']}: {row['worst ratio']:.3f} of torchgpipe's at worst; {row['target']}"


def ordered(peaks: Peaks) -> list[Row]:
    """Memory of schedules beside the drop-in pipeline, where nothing is checkpointed."""
    rows: list[Row] = []
    for (subject, mode, who), its in peaks.items():
        if who not in WHO:
            row: Row = {"model": subject.model, "chunks": subject.chunks, "schedule": who}
            row["MiB"] = sum(its.values()) / MiB
            if beside := peaks.get((subject, mode, "split")):
                row["/ drop-in, split, never"] = sum(its.values()) / sum(beside.values())
            rows.append(row)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("memory", __doc__)
    script.subjects(parser, models=list(MODELS), preset="quick")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 8], help="microbatches")
    parser.add_argument("--checkpoint", nargs="+", choices=MODES, default=list(MODES), help="modes")
    parser.add_argument("--schedules", nargs="*", choices=schedule.names(),
                        default=["1f1b", "zb-h1", "v-half", "v-min"],
                        help="counted with the last number of microbatches (1f1b zb-h1 v-half v-min)")
    parser.add_argument("--passes", type=int, default=5, help="steps, of which that counts which takes most")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Counts and prints; the exit code."""
    options = make_parser().parse_args(argv)
    wanted = cases(options)
    here = {key: each for key, each in wanted.items() if not each.missing(key[0])}
    reasons = {each.package: each.missing(key[0]) for key, each in wanted.items() if key not in here}
    left_out = [f"{package}: {why}" for package, why in reasons.items()]
    environment = script.environment(left_out, {each.package for each in here.values()}, threads=1)

    peaks: dict[tuple[Subject, str, str], dict[str, int]] = {}
    for model in options.models:
        its = [key for key in here if key[0].model == model]
        peaks.update(zip(its, apart(counted, [(here[key], key[0], options.passes) for key in its], options.device)))
        print(f"{model}: {len(its)} cases", file=sys.stderr, flush=True)
    rows = compared(peaks)
    tables = {"memory": rows, "worst": worst(rows), "schedules": ordered(peaks)}
    code = script.finish(options, environment, tables)
    print("", *map(say, tables["worst"]), sep="\n")
    return code


if __name__ == "__main__":
    script.run(main)
