"""What models do with memory on simulated devices: pinned memory that is read, statistics, allocations that fail."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe

from . import TOTAL, Launch, allocated, forget, launches
from .clocks import Clocks
from .pools import reserved

WIDTH = 16
ROWS = 8
#: Of what is reserved: layers of a device, their width, microbatches, rows of each, steps.
DEEP, WIDE, CHUNKS, FEW, STEPS = 6, 64, 4, 32, 4


def squared(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference, of ops that every device has."""
    return (output - target).square().mean()


class Pinned(nn.Module):
    """Gives its input in pinned memory, if that is on the CPU: as layers do that refill a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, pin_memory=x.device.type == "cpu").copy_(x)


def _linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def _unread(log: Sequence[Launch]) -> list[str]:
    """Copies from pinned memory of whose end the host knows nothing: whoever refills it would change what is copied."""
    clocks, copies = Clocks(), []
    for launch in log:
        stream = launch.device, launch.stream
        if launch.kind not in ("op", "copy"):
            clocks.take(launch)
            continue
        at = clocks.tick(stream)
        if "not wait" in launch.name:
            copies.append((stream, at, launch.name))
    return [name for stream, at, name in copies if clocks.host.get(stream, 0) < at]


def pinned() -> dict[str, list[Any]]:
    """How many copies from pinned memory were begun without a wait, and those not ended after the call, and backward.
    """
    x, y = torch.randn(ROWS, WIDTH).pin_memory(), torch.randn(ROWS, WIDTH).pin_memory()
    ways: dict[str, tuple[list[str], dict[str, Any]]] = {
        "inside": (["cpu", "sim:0"], {"balance": [2, 1]}), "given": (["sim:0", "sim:1"], {"balance": [2, 1]}),
        "given, by cuts": (["sim:0", "sim:1"], {"cuts": ["2"]}),
    }
    found = {}
    for way, (devices, borders) in ways.items():
        for schedule in None, "1f1b":
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pinned(), nn.Linear(WIDTH, WIDTH))
            options: dict[str, Any] = {} if schedule is None else {"schedule": schedule, "loss_fn": squared}
            if "cuts" in borders:
                options["batched"] = {}  # By its own forward, as any module.
            model = SplitPipe(module, devices=devices, chunks=2, **borders, **options)
            if "cuts" in borders:
                model(x)  # Parameters go to their devices.
            forget()
            loss = model(x) if schedule is None else model(x, target=y)
            log = launches()
            begun, unread = sum("not wait" in it.name for it in log), _unread(log)
            loss = squared(loss, y.to(loss.device)) if schedule is None else loss
            loss.backward()
            found[f"{way}, {schedule or 'drop-in'}"] = [begun, unread, _unread(launches())]
    return found


class Context:
    """What a stream is of no use without, such as a green context."""


class Own(torch.Stream):
    """A stream that keeps its context."""

    context: Context


def kept() -> list[bool]:
    """Whether what came with a stream is alive: while the model is that computes on it, and after that."""
    own = Own(device="sim:0")
    own.context = Context()
    context = weakref.ref(own.context)
    model = SplitPipe(_linears(1), [1], devices=[own], chunks=2)
    del own
    with torch.no_grad():  # Autograd's threads would let go of the stream at some later time.
        model(torch.randn(ROWS, WIDTH, device="sim:0"))
    found = [context() is not None]
    del model
    gc.collect()
    return [*found, context() is not None]


def recorded() -> list[Any]:
    """Steps, their time and the most memory of each device, of a recording."""
    model = SplitPipe(_linears(4), [2, 2], devices=["sim:0", "sim:1"], chunks=4, schedule="zb-h1", loss_fn=squared)
    x, y = torch.randn(ROWS, WIDTH, device="sim:0"), torch.randn(ROWS, WIDTH, device="sim:1")
    with model.record() as timeline:
        for _ in range(2):
            model(x, target=y).backward()
    return [timeline.steps, timeline.makespan, timeline.memory]


def planned() -> list[Any]:
    """Devices of plans and the bytes that they may use there, beside those that no tensor has."""
    torch.empty(2**26, dtype=torch.uint8, device="sim:0")  # Freed, it is kept for later.
    plans = [  # Of one device each: of two, a plan may leave out one by the times that it has measured.
        splitpipe.plan(
            _linears(4), torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH), loss_fn=squared,
            devices=[device], chunks=2, schedules=["1f1b"], seconds=0.1, progress=False,
        ) for device in ("sim:0", "sim:1")
    ]
    free = [TOTAL - allocated(device) for device in range(2)]
    return [[device for plan in plans for device in plan.devices], [plan.memory[0] for plan in plans], free]


def pools() -> dict[str, dict[str, list[int]]]:
    """Bytes that are reserved on each of two devices, with the host as far ahead as can be, and not at all."""
    ways: dict[str, dict[str, Any]] = {
        "drop-in, autograd": {"backward": "autograd"},
        "drop-in, split": {"backward": "split", "stash_limit": 0},  # What is held back is another matter.
        "1f1b, autograd": {"backward": "autograd", "schedule": "1f1b", "loss_fn": squared},
        "1f1b, split": {"backward": "split", "schedule": "1f1b", "loss_fn": squared},
    }
    found = {}
    for way, options in ways.items():
        forget()
        _train(options)
        log = launches()
        found[way] = {
            when: [sum(size for (its, _), size in reserved(log, ahead).items() if its == device) for device in range(2)]
            for when, ahead in (("at once", False), ("ahead", True))
        }
    return found


def _train(options: dict[str, Any]) -> None:
    """Some steps, after each of which the host asks for the loss: so it is never further ahead than the last one."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(2 * DEEP)))
    model = SplitPipe(
        module, [DEEP, DEEP], devices=["sim:0", "sim:1"], chunks=CHUNKS, checkpoint="never", **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (torch.randn(CHUNKS * FEW, WIDE, device=device) for device in model.devices)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x, target=y) if "schedule" in options else squared(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
        del loss
