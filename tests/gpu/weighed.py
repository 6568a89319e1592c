"""A GPT trained by both engines and by torchgpipe: seconds of a step, and bytes that the devices reserve."""
from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CHUNKS = 8
#: How far losses of the first step may be apart, relatively.
CLOSE = 2e-2


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: whose it is, and how.
        make: gives a step of it.
    """

    name: str
    make: Callable[[], Callable[[], Tensor]]


def ways(kind: str, checkpoint: str, preset: str, every: bool = False) -> tuple[list[Way], list[str]]:
    """Who there is, and who is missing, with the reason; all on two devices, or twice on the only one.

    Args:
        kind: of the devices.
        checkpoint: of all of them.
        preset: the size of the GPT.
        every: by cuts, too, and by schedules, where nothing is checkpointed.
    """
    import splitpipe.skip
    from benchmarks.harness import contenders
    from benchmarks.harness.subject import Subject, case

    count = torch.accelerator.device_count()
    subject = Subject("gpt", preset, CHUNKS, f"{kind}:0")
    devices = [f"{kind}:{index % count}" for index in range(2)]

    def make(way: Callable[..., Any], **options: Any) -> Callable[[], Tensor]:
        model, step = way(case(subject, splitpipe.skip), checkpoint=checkpoint, **options)
        parameters = list(model.parameters())

        def whole() -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            loss: Tensor = step()
            return loss

        return whole

    def on_devices(way: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before, contenders.places = contenders.places, lambda device, count: devices[:count]
            try:
                return way(*args, **options)
            finally:
                contenders.places = before

        return run

    def make_by(schedule: str) -> Callable[[], Tensor]:
        return make(on_devices(lambda case, checkpoint: contenders.scheduled(case, name=schedule)))

    dropin = on_devices(contenders.dropin)
    found = [
        Way("split", lambda: make(dropin, backward_by="split")),
        Way("autograd", lambda: make(dropin, backward_by="autograd")),
    ]
    if every:
        found.append(Way("by cuts", lambda: make(on_devices(_by_cuts))))
    if every and checkpoint == "never":
        found += [Way(name, partial(make_by, name)) for name in ("1f1b", "zb-h1")]
    if find_spec("torchgpipe") is None:
        return found, ["the comparison with torchgpipe, which is not installed"]
    return [*found, Way("torchgpipe", lambda: make(on_devices(contenders.torchgpipe)))], []


def speed(kind: str, preset: str) -> dict[str, Any]:
    """How long a step takes, in turns in one process; losses are the same."""
    them, skipped = ways(kind, "never", preset)
    from benchmarks.harness import measure

    made = {way.name: way.make() for way in them}
    losses = {name: step().item() for name, step in made.items()}
    wrong = [
        f"a GPT's first loss is {loss:.6f} by {name}, {losses['autograd']:.6f} by autograd"
        for name, loss in losses.items() if not abs(loss - losses["autograd"]) <= CLOSE * abs(losses["autograd"])
    ]
    taken = measure.interleaved(made, passes=2 if preset == "quick" else 7, wait=_synchronize)
    ratios = {
        f"autograd / {name}": measure.ratio(taken["autograd"].wall, its.wall)
        for name, its in taken.items() if name != "autograd"
    }
    if "torchgpipe" in taken:
        ratios["torchgpipe / split"] = measure.ratio(taken["torchgpipe"].wall, taken["split"].wall)
    said = ", ".join(f"{what} {value:.2f}" for what, value in ratios.items())
    return {
        "result": f"seconds of a step of a {preset} GPT, by each other: {said}", "wrong": wrong,
        "skipped": skipped, "more": {"seconds": {name: its.wall for name, its in taken.items()}, "ratios": ratios},
    }


def _by_cuts(case: Any, *, checkpoint: Any) -> Any:
    """A module with cuts, with the loss outside."""
    from benchmarks.harness import contenders
    from splitpipe import SplitPipe

    model = SplitPipe(
        case.layers, cuts=[str(case.balance(2)[0])], batched={}, devices=contenders.places(case.subject.device, 2),
        chunks=CHUNKS, checkpoint=checkpoint,
    )
    return contenders.outside(case, model)


def memory(kind: str, preset: str) -> dict[str, Any]:
    """The most bytes that devices reserve and have allocated, beside torchgpipe in the same mode, or else autograd."""
    rows: list[dict[str, Any]] = []
    said, skipped = [], []
    for checkpoint in ("never", "except_last", "always"):
        them, skipped = ways(kind, checkpoint, preset, every=True)
        found = {way.name: _peaks(kind, way) for way in them}
        rows += [{"checkpoint": checkpoint, "way": name, **its} for name, its in found.items()]
        other = found.get("torchgpipe", found["autograd"])
        shares = {
            name: [f"{sum(its[what]) / max(1, sum(other[what])):.2f}" for what in ("reserved", "allocated")]
            for name, its in found.items() if its is not other
        }
        said.append(f"{checkpoint}: {', '.join(f'{name} {one} ({two})' for name, (one, two) in shares.items())}")
    whose = "autograd's" if skipped else "torchgpipe's"
    return {"result": f"bytes reserved (and allocated), by {whose} in the same mode, {'; '.join(said)}", "wrong": [],
            "skipped": skipped, "more": {"peaks": rows}}


def _peaks(kind: str, way: Way) -> dict[str, list[int]]:
    module = torch.get_device_module(kind)
    count = torch.accelerator.device_count()
    gc.collect()
    _synchronize()
    module.empty_cache()
    for index in range(count):
        torch.empty(1, device=f"{kind}:{index}")  # An allocator that was never asked has no statistics.
        module.reset_peak_memory_stats(index)
    step = way.make()
    for _ in range(4):
        step()
    _synchronize()
    return {
        "reserved": [module.max_memory_reserved(index) for index in range(count)],
        "allocated": [module.max_memory_allocated(index) for index in range(count)],
    }


def _synchronize() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
