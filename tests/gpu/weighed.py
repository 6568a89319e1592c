"""A GPT trained by both engines and by torchgpipe: seconds of a step, and bytes that the devices reserve."""
from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
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


def ways(kind: str, checkpoint: str, preset: str) -> tuple[list[Way], list[str]]:
    """Who there is, and who is missing, with the reason; all on two devices, or twice on the only one."""
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

    dropin = on_devices(contenders.dropin)
    found = [
        Way("split", lambda: make(dropin, backward_by="split")),
        Way("autograd", lambda: make(dropin, backward_by="autograd")),
    ]
    if kind == "sim" or find_spec("torchgpipe") is None:
        why = "knows no simulated devices" if kind == "sim" else "is not installed"
        return found, [f"the comparison with torchgpipe, which {why}"]
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
    taken = measure.interleaved(made, passes=2 if preset in ("tiny", "quick") else 7, wait=_synchronize)
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


def memory(kind: str, preset: str) -> dict[str, Any]:
    """The most bytes that devices reserve and have allocated, split against autograd."""
    rows: list[dict[str, Any]] = []
    for checkpoint in ("never", "except_last"):
        for way in ways(kind, checkpoint, preset)[0][:2]:
            rows.append({"checkpoint": checkpoint, "way": way.name, **_peaks(kind, way)})
    said = []
    for split, autograd in zip(rows[::2], rows[1::2]):
        shares = [sum(split[what]) / max(1, sum(autograd[what])) for what in ("reserved", "allocated")]
        said.append(f"{split['checkpoint']}: reserved {shares[0]:.2f}, allocated {shares[1]:.2f}")
    return {"result": f"bytes of split by those of autograd, {'; '.join(said)}", "wrong": [], "skipped": [],
            "more": {"peaks": rows}}


def _peaks(kind: str, way: Way) -> dict[str, list[int]]:
    module = torch.get_device_module(kind)
    count = torch.accelerator.device_count()
    gc.collect()
    _synchronize()
    if kind == "sim":  # What torch's allocator would have reserved, found from the log.
        from tests.simdev import forget

        forget()
    else:
        torch.accelerator.empty_cache() if hasattr(torch.accelerator, "empty_cache") else module.empty_cache()
    for index in range(count):
        torch.empty(1, device=f"{kind}:{index}")  # An allocator that was never asked has no statistics.
        module.reset_peak_memory_stats(index)
    step = way.make()
    for _ in range(4):
        step()
    _synchronize()
    reserved = _simulated(count) if kind == "sim" else [module.max_memory_reserved(index) for index in range(count)]
    return {
        "reserved": reserved,
        "allocated": [module.max_memory_allocated(index) for index in range(count)],
    }


def _simulated(count: int) -> list[int]:
    from tests.simdev import launches
    from tests.simdev.pools import reserved

    pools = reserved(launches(), ahead=True)
    return [sum(size for (device, _), size in pools.items() if device == index) for index in range(count)]


def _synchronize() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
