"""What threads and streams do before there is anything to order: contexts made, the interpreter's lock, few streams.

The first thing of its process to use a device: a context, once made, stays.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from splitpipe import SplitPipe
from splitpipe.core import stream

from . import contexts, forget, launches, locked, set_pool, unbound
from .cases import Case, run
from .subjects import WIDTH, chain, mean

#: Where nothing is told about streams apart.
FEW = [
    Case(subject, 4, 3, checkpoint, "split", schedule, own, parts)
    for subject in ("chain", "skips", "elsewhere")
    for checkpoint, schedule, own, parts in (
        ("never", None, True, False), ("always", None, False, True), ("never", "zb-h1", True, True),
        ("always", "zb-v", False, False),
    )
]


def found() -> dict[str, Any]:
    """Contexts after training on devices 1 and 2, then on 0 and 1 too; products without one; calls under the lock."""
    before = locked()
    away = _trained("sim:1", "sim:2")
    return {"made": away, "all": _trained("sim:0", "sim:1"), "unbound": unbound(), "locked": locked() - before}


def _trained(*devices: str) -> list[int]:
    for scheduled in (False, True):
        options: dict[str, Any] = {"schedule": "zb-h1", "loss_fn": mean} if scheduled else {}
        model = SplitPipe(chain(2), [1, 1], devices=devices, chunks=2, **options)
        for _ in range(2):
            x, y = torch.randn(4, WIDTH).to(devices[0]), torch.randn(4).to(devices[1])
            loss = model(x, target=y) if scheduled else mean(model(x), y)
            loss.backward()
            model.zero_grad()
    stream.synchronize(torch.device(devices[0]))
    return sorted({device for device, _, _ in contexts()})


def priorities() -> dict[str, list[int]]:
    """Of the streams that copy, and of those that multiply, in stages whose streams go first, and in others."""
    told: dict[str, list[int]] = {}
    for name, devices in {
        "default": ["sim:0", "sim:1"], "first": [torch.Stream(device=f"sim:{index}", priority=-1) for index in range(2)]
    }.items():
        model = SplitPipe(chain(2), [1, 1], devices=devices, chunks=2, stash_limit=0)
        x, y = torch.randn(4, WIDTH).to("sim:0"), torch.randn(4).to("sim:1")
        forget()
        mean(model(x), y).backward()
        log = launches()
        told[f"{name}: copies"] = sorted({each.priority for each in log if each.kind == "copy"})
        told[f"{name}: products"] = sorted({each.priority for each in log if each.multiplications})
    return told


def reduced() -> dict[str, list[str]]:
    """What a call inside DistributedDataParallel is refused with, drop-in and scheduled, by where stages compute."""
    told: dict[str, list[str]] = {"default": [], "caller's": [], "parts": [], "not synchronized": [], "another's": []}
    for name, refusals in told.items():
        for scheduled in (False, True):
            devices: list[Any] = ["sim:0", "sim:1"]
            if name == "parts":
                devices = [torch.Stream(device="sim:0"), torch.Stream(device="sim:0")]
            options: dict[str, Any] = {"schedule": "1f1b", "loss_fn": mean} if scheduled else {}
            model = SplitPipe(chain(2), [1, 1], devices=devices, chunks=2, **options)
            x, y = torch.randn(4, WIDTH).to("sim:0"), torch.randn(4).to(model.devices[1])
            own = stream.new(torch.device("sim:1")) if name in ("caller's", "not synchronized", "another's") else None
            around = SimpleNamespace(
                module=chain(1) if name == "another's" else model,
                require_backward_grad_sync=name != "not synchronized",
            )
            with mock.patch.object(DistributedDataParallel, "_active_ddp_module", around), stream.use(own):
                try:
                    (model(x, target=y) if scheduled else mean(model(x), y)).backward()
                except RuntimeError as error:
                    refusals.append(str(error)[:50])
    return told


def narrow() -> list[str]:
    """Cases that fail where a device has two streams for each priority, which all have to share."""
    set_pool(2)
    try:
        return _failing()
    finally:
        set_pool(32)


def generic() -> list[str]:
    """Cases that fail where a device has no classes of its own for streams and events."""
    with _generic():
        return _failing()


def _failing() -> list[str]:
    found = [(case, run(case)) for case in FEW]
    return [f"{case}: {out.hazards.most_common(2)} {out.faults}" for case, out in found if out.hazards or out.faults]


@contextmanager
def _generic() -> Iterator[None]:
    module: Any = torch.get_device_module("sim")
    own, event = module.Stream, module.Event
    module.Stream, module.Event = torch.Stream, None
    stream._kind.cache_clear()
    try:
        yield
    finally:
        module.Stream, module.Event = own, event
        stream._kind.cache_clear()
