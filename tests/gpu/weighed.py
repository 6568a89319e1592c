"""A GPT trained by both engines and by torchgpipe: seconds of a step, and bytes that the devices reserve."""
from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import contenders, measure
from benchmarks.harness.contenders import Contender
from benchmarks.harness.subject import Subject
from splitpipe import SplitPipe

CHUNKS = 8
#: How far losses of the first step may be apart, relatively.
CLOSE = 2e-2
Step = Callable[[], Tensor]


def ways(checkpoint: str, preset: str, every: bool = False) -> tuple[dict[str, Callable[[], Step]], list[str]]:
    """How to train, by name, and what is missing, with the reason; on two devices, or twice on the only one.

    ``every``: by cuts, too, and by schedules, where nothing is checkpointed.
    """
    subject = Subject("gpt", preset, CHUNKS, "cuda")

    def start(contender: Contender) -> Step:
        model, compute = contender.built(subject)

        def step() -> Tensor:
            model.zero_grad()
            return compute()

        return step

    them = dict(zip(("split", "autograd", "torchgpipe"), contenders.drop_ins(checkpoint)))
    if every:
        them["by cuts"] = Contender("splitpipe", "by cuts", "own", partial(_by_cuts, checkpoint=checkpoint))
    if every and checkpoint == "never":
        them |= {each.way: each for each in contenders.by_schedule(("1f1b", "zb-h1"))}
    missing = [f"the comparison with {name}: {why}" for name, each in them.items() if (why := each.missing(subject))]
    return {name: partial(start, each) for name, each in them.items() if not each.missing(subject)}, missing


def _by_cuts(case: Any, *, checkpoint: Any) -> Any:
    """A module with cuts, with the loss outside."""
    return contenders.outside(case, SplitPipe(
        case.layers, cuts=[str(case.balance(2)[0])], batched={}, devices=contenders.places("cuda", 2), chunks=CHUNKS,
        checkpoint=checkpoint,
    ))


def speed(preset: str) -> dict[str, Any]:
    """How long a step takes, in turns in one process; losses are the same."""
    them, skipped = ways("never", preset)
    steps = {name: way() for name, way in them.items()}
    losses = {name: step().item() for name, step in steps.items()}
    wrong = [
        f"a GPT's first loss is {loss:.6f} by {name}, {losses['autograd']:.6f} by autograd"
        for name, loss in losses.items() if not abs(loss - losses["autograd"]) <= CLOSE * abs(losses["autograd"])
    ]
    seconds = {name: its.wall for name, its in measure.interleaved(steps, 2 if preset == "quick" else 7).items()}
    compared = [("autograd", name) for name in seconds if name != "autograd"]
    if "torchgpipe" in seconds:
        compared.append(("torchgpipe", "split"))
    ratios = {f"{one} / {other}": measure.ratio(seconds[one], seconds[other]) for one, other in compared}
    said = ", ".join(f"{what} {value:.2f}" for what, value in ratios.items())
    return {
        "result": f"seconds of a step of a {preset} GPT, by each other: {said}", "wrong": wrong, "skipped": skipped,
        "more": {"seconds": seconds, "ratios": ratios},
    }


def memory(preset: str) -> dict[str, Any]:
    """The most bytes that devices reserve and have allocated, beside torchgpipe in the same mode, or else autograd."""
    rows, said, skipped = [], [], list[str]()
    for checkpoint in ("never", "except_last", "always"):
        them, skipped = ways(checkpoint, preset, every=True)
        found = {name: _peaks(way) for name, way in them.items()}
        rows += [{"checkpoint": checkpoint, "way": name, **its} for name, its in found.items()]
        other = found.get("torchgpipe", found["autograd"])
        shares = []
        for name, its in found.items():
            one, two = (sum(its[what]) / max(1, sum(other[what])) for what in ("reserved", "allocated"))
            shares += [f"{name} {one:.2f} ({two:.2f})"] * (its is not other)
        said.append(f"{checkpoint}: {', '.join(shares)}")
    whose = "autograd's" if skipped else "torchgpipe's"
    return {"result": f"bytes reserved (and allocated), by {whose} in the same mode, {'; '.join(said)}", "wrong": [],
            "skipped": skipped, "more": {"peaks": rows}}


def _peaks(way: Callable[[], Step]) -> dict[str, list[int]]:
    devices = range(torch.cuda.device_count())
    gc.collect()
    measure.synchronize()
    torch.cuda.empty_cache()
    for device in devices:
        torch.empty(1, device=device)  # An allocator that was never asked has no statistics.
        torch.cuda.reset_peak_memory_stats(device)
    step = way()
    for _ in range(4):
        step()
    measure.synchronize()
    return {
        "reserved": [torch.cuda.max_memory_reserved(device) for device in devices],
        "allocated": [torch.cuda.max_memory_allocated(device) for device in devices],
    }
