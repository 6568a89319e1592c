"""The planner against the clock: the step that it predicts and the one that is measured; its balance and others'.

The process keeps the memory that it has had, as PyTorch does on a GPU. By default glibc gives large blocks back to the
system as soon as they are free, and a step waits for them again, by the order of its ops.

Example:
    python -m benchmarks.parts.planner --save benchmarks/results/planner-cpu.json
    python -m benchmarks.parts.planner --models unet --passes 11
    python -m benchmarks.parts.planner --device cuda --preset large --save benchmarks/results/planner-cuda.json
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import splitpipe
from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from benchmarks.harness.subject import MODELS, PRESETS, Case, Subject, case, even
from splitpipe import Plan, SplitPipe
from splitpipe.balance import balance_by_time

MODULE = "benchmarks.parts.planner"
#: By which glibc keeps all memory.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def devices(name: str) -> list[str]:
    """Where stages are: all GPUs, or two stages on the CPU."""
    return ["cpu", "cpu"] if name == "cpu" else [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def step(model: SplitPipe, it: Case) -> Callable[[], None]:
    """Forward and backward of the batch; gradients are dropped."""
    input, target = it.input.to(model.devices[0]), it.target.to(model.devices[-1])

    def run() -> None:
        model(input, target=target).backward()
        model.zero_grad(set_to_none=True)

    return run


def balances(plan: Plan, it: Case, seconds: float) -> dict[str, list[int]]:
    """Balances that others would choose, for the same schedule; ``balance_by_time`` has so many seconds."""
    stages = len(plan.balance)
    sample = it.input[: -(-len(it.input) // plan.chunks)]
    timed = balance_by_time(stages, it.layers, sample, timeout=seconds, device=torch.device(plan.devices[0]))
    return {"planned": [*plan.balance], "balance_by_time": timed, "even": even(len(it.layers), stages)}


def models(plan: Plan, it: Case, of: dict[str, list[int]]) -> dict[str, SplitPipe]:
    """The model with each balance, run as planned; equal balances are one."""
    pipelines: dict[str, SplitPipe] = {}
    for name, balance in of.items():
        arguments: dict[str, Any] = {**plan.arguments(), "balance": balance}
        pipelines[name] = SplitPipe(copy.deepcopy(it.layers), **arguments)
    return pipelines


def rivals(plan: Plan, it: Case, count: int) -> dict[str, tuple[SplitPipe, float]]:
    """Runners-up that fit and have a name, and what is predicted for them."""
    pipelines = {}
    for other in plan.runners_up:
        name, *rest = other.way.split(", ")
        if name not in splitpipe.schedule.names() or len(pipelines) == count:
            continue
        chunks = int(rest[0].split()[0])
        checkpoint = rest[1].partition("=")[2].strip("'") if len(rest) > 1 else "never"
        arguments: dict[str, Any] = {**plan.arguments(), "schedule": name, "chunks": chunks, "checkpoint": checkpoint}
        arguments["balance"] = list(other.balance)
        pipelines[other.way] = SplitPipe(copy.deepcopy(it.layers), **arguments), other.step_time
    return pipelines


def measured(it: Case, options: argparse.Namespace) -> dict[str, list[Row]]:
    """The tables of one model."""
    subject, places = it.subject, devices(it.subject.device)
    plan = splitpipe.plan(
        it.layers, it.input, target=it.target, loss_fn=subject.spec.loss, devices=places, chunks=options.chunks,
        schedules=options.schedules, seconds=options.seconds,
    )
    print(f"\n{subject.model}\n\n{plan}", flush=True)
    cut = models(plan, it, balances(plan, it, max(0.1, min(5.0, options.seconds))))
    others = rivals(plan, it, options.rivals)
    steps = {name: step(model, it) for name, model in cut.items()}
    steps |= {way: step(model, it) for way, (model, _) in others.items()}
    timings = measure.interleaved(steps, options.passes)
    with splitpipe.record(cut["planned"]) as timeline:
        for _ in range(5):
            steps["planned"]()
    print(f"\n{plan.compare(timeline)}", flush=True)
    predicted = {plan.way: plan.step_time} | {way: time for way, (_, time) in others.items()}
    clock = {plan.way: timings["planned"].median * 1e3} | {way: timings[way].median * 1e3 for way in others}
    return {
        "steps": [
            {
                "model": subject.model, "as": "planned" if way == plan.way else "runner-up", "way": way,
                "predicted, ms": predicted[way], "measured, ms": clock[way],
                "error": predicted[way] / clock[way] - 1,
            }
            for way in predicted
        ],
        "balances": [
            {
                "model": subject.model, "balance": name, "layers a stage": str(list(cut[name].balance)),
                "step, ms": timings[name].median * 1e3,
                "step / planned": measure.ratio(timings[name].wall, timings["planned"].wall),
            }
            for name in cut
        ],
    }


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("planner", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=["gpt", "unet"], help="which models")
    add("--preset", choices=PRESETS, default="small", help="their sizes")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="two stages on the CPU, or all GPUs")
    add("--chunks", type=int, nargs="+", help="microbatches to choose from (those of splitpipe.plan)")
    add("--schedules", nargs="+", choices=splitpipe.schedule.names(), metavar="NAME", help="to choose from (all)")
    add("--seconds", type=float, default=20.0, help="for the profile of a model")
    add("--passes", type=int, default=5, help="timed rounds")
    add("--rivals", type=int, default=2, help="runners-up that are measured as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    options = make_parser().parse_args(argv)
    environment = script.environment(preset=options.preset)
    tables: dict[str, list[Row]] = {"steps": [], "balances": []}
    for name in options.models:
        more = measured(case(Subject(name, options.preset, 1, options.device)), options)
        for title, rows in more.items():
            tables[title] += rows
    return script.finish(options, environment, tables)


if __name__ == "__main__":
    # Read when a process starts.
    if not KEPT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", MODULE, *sys.argv[1:]], {**os.environ, **KEPT})
    script.run(main)
