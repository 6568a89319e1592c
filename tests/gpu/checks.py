"""What has to hold on devices, as functions of their kind: run by tests on CUDA, and by the command.

Each compares with the unwrapped module, in doubles where nothing else is said: rounding, which a GPU may do in another
order each time, is in the last digits then. Layers spin before they give what they compute (``Slow``), so that whoever
does not wait for it reads something else.
"""
from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.core import stream

WIDTH = 64
#: Cycles that a GPU spins, a quarter of a millisecond or so: the host is far ahead after them.
CYCLES = 400_000
#: How far from the unwrapped module's a value of some hundred steps may be, in doubles.
CLOSE = 1e-8
CHECKPOINT = ("never", "except_last", "always")
BACKWARD = ("split", "autograd")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Check:
    """Something that has to hold.

    Args:
        name: what it is about.
        holds: raises what is wrong, given the kind of device.
        devices: how many different ones it needs.
        only: the kind that it needs; None: any.
    """

    name: str
    holds: Callable[[str], None]
    devices: int = 1
    only: str | None = None

    def lacks(self, kind: str, there: int) -> str | None:
        """What this machine hasn't got for it."""
        if self.only not in (None, kind):
            return f"it is about {self.only} alone"
        return f"it needs {self.devices} devices, and there are {there}" if there < self.devices else None


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        spin(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spin(grad)
        return grad.clone()


class Slow(nn.Module):
    """The tensor, late: forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x)


class Hungry(nn.Module):
    """The tensor; asks for more memory than there is where it is told to.

    Attributes:
        at: "forward", "backward", or nowhere: None.
    """

    at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "forward":
            too_much(x)
        if self.at == "backward" and x.requires_grad:
            x = x * 1
            x.register_hook(too_much)
        return x


def spin(x: Tensor) -> None:
    """Keeps the stream busy that the tensor's device works on."""
    if x.is_cuda:
        torch.cuda._sleep(CYCLES)


def too_much(x: Tensor) -> None:
    x.new_empty(2**50)


def places(kind: str, count: int, devices: int, part: Any = None) -> list[Any]:
    """A device for each of so many stages, in turn; streams of them, of that class, if it is given."""
    names = [kind if kind == "cpu" else f"{kind}:{number % devices}" for number in range(count)]
    return names if part is None else [part(device=torch.device(name)) for name in names]


def classes(kind: str) -> list[Any]:
    """The classes of stream that users have: torch's own, and the device module's."""
    own = getattr(torch.get_device_module(kind), "Stream", None)
    return [torch.Stream] if own in (None, torch.Stream) else [torch.Stream, own]


@contextmanager
def exact() -> Iterator[None]:
    """Doubles by default, which have no TF32 either."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def slow(stages: int, *more: Callable[[], nn.Module]) -> nn.Sequential:
    """A product, a wait and an activation in each stage."""
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *(make() for make in more), Slow(), nn.Tanh()) for _ in range(stages)
    ))


def wrapped(
    module: nn.Sequential, kind: str, devices: int, schedule: str | None = None, part: Any = None, **options: Any
) -> SplitPipe:
    """The module as a pipeline of a stage a layer."""
    rows = len(module) // 2 if schedule == "zb-v" else len(module)
    more = {} if schedule is None else {"schedule": schedule, "loss_fn": squared}
    return SplitPipe(
        module, [1] * len(module), devices=places(kind, rows, devices, part), **{"chunks": 4, **more, **options}
    )


def squared(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference, of ops that every device has."""
    return (output - target).square().mean()


def loss_of(model: nn.Module, x: Tensor, y: Tensor, schedule: str | None = None) -> Tensor:
    """The mean squared difference, inside of a scheduled model or outside."""
    if isinstance(model, SplitPipe) and schedule is not None:
        inside: Tensor = model(x, target=y)
        return inside
    output: Tensor = model(x)
    return squared(output, y.to(output.device))


def steps(
    kind: str, devices: int, count: int, schedule: str | None = None, part: Any = None, own: bool = False,
    **options: Any,
) -> None:
    """Trains beside the unwrapped module on memory that is used again, while the host runs ahead.

    What differs is summed up on the device: a look at it each step would have the host wait, and hide a race.

    Args:
        kind: of the devices.
        devices: how many different ones.
        count: of steps.
        schedule: its name; None: the drop-in.
        part: the class of the streams that are the devices; None: the devices themselves are.
        own: whether the caller is on streams of its own.
        options: more of SplitPipe.
    """
    with exact():
        torch.manual_seed(0)
        module = slow(4)
        plain = copy.deepcopy(module).to(places(kind, 1, 1)[0])
        model = wrapped(module, kind, devices, schedule, part, **options)
        first, last = model.devices[0], model.devices[-1]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model)]
        with callers(kind, devices) if own else _nothing():
            worst = torch.zeros((), device=first)
            for number in range(count):
                x, y = torch.randn(10, WIDTH, device=first), torch.randn(10, WIDTH, device=last)
                press(kind, devices)
                losses = []
                for each, optimizer in zip((plain, model), optimizers):
                    optimizer.zero_grad()
                    loss = loss_of(each, x, y, schedule)
                    loss.backward()
                    losses.append(loss.detach().to(first))
                worst = torch.maximum(worst, (losses[0] - losses[1]).abs())
                for one, other in zip(plain.parameters(), model.parameters()):
                    assert one.grad is not None and other.grad is not None
                    worst = torch.maximum(worst, (one.grad - other.grad.to(first)).abs().max())
                for optimizer in optimizers:
                    optimizer.step()
                if number % 50 == 49 or number == count - 1:
                    found = worst.item()
                    assert found <= CLOSE, f"a loss or gradient is wrong by {found:.3g} by step {number}"


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def callers(kind: str, devices: int) -> Iterator[None]:
    """The caller on streams of its own."""
    names = [torch.device(name) for name in places(kind, devices, devices)]
    own = [classes(kind)[-1](device=name) for name in names]
    for name in names:
        torch.accelerator.synchronize(name)
    with stream.use(*own[::-1]):  # The first device's last: that one is current then.
        yield
    for name in names:
        torch.accelerator.synchronize(name)


def press(kind: str, devices: int) -> None:
    """Fills free memory with what is no number, for whoever reads what was never written."""
    for name in places(kind, devices, devices):
        for size in (WIDTH, 10 * WIDTH, WIDTH * WIDTH):
            torch.full((size,), torch.nan, device=name)


def compare(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Equal but for rounding, wherever they are."""
    assert (found is None) == (expected is None), f"{what} is {found}, expected {expected}"
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected.to(found.device), msg=lambda text: f"{what}: {text}")


def gradients(model: nn.Module, plain: nn.Module, what: str) -> None:
    """Those of both are equal."""
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        compare(one.grad, other.grad, f"{what}: the gradient of {name}")


def repeated(kind: str, devices: int) -> None:
    """From one seed come the same losses, gradients and next random numbers, checkpointed or not."""
    first: list[Tensor] = []
    for checkpoint, again in product(CHECKPOINT, range(2)):
        with exact():
            torch.manual_seed(0)
            model = wrapped(slow(3, nn.Dropout), kind, devices, checkpoint=checkpoint)
            told: list[Tensor] = []
            for _ in range(3):
                x = torch.randn(10, WIDTH).to(model.devices[0])
                loss = model(x).square().mean()
                loss.backward()
                told += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            told += [torch.rand(3, device=device) for device in dict.fromkeys(model.devices)]
            first = first or told
            for one, other in zip(told, first, strict=True):
                compare(one, other, f"{checkpoint}, run {again}")


def out_of_memory(kind: str, devices: int) -> None:
    """A step without the memory for it says so and keeps none; the next one is right."""
    for at, schedule, backward in product(("forward", "backward"), (None, "zb-h1"), BACKWARD):
        what = f"{at}, {schedule or 'drop-in'}, {backward}"
        with exact():
            torch.manual_seed(0)
            module = slow(3, Hungry)
            plain = copy.deepcopy(module).to(places(kind, 1, 1)[0])
            model = wrapped(module, kind, devices, schedule, checkpoint="except_last", backward=backward)
            x, y = torch.randn(10, WIDTH, device=model.devices[0]), torch.randn(10, WIDTH, device=model.devices[-1])
            loss_of(model, x, y, schedule).backward()
            model.zero_grad()
            before = _allocated(kind, devices)
            hungry: Any = model[1][1]
            hungry.at = at
            try:
                loss_of(model, x, y, schedule).backward()
            except RuntimeError as error:
                assert kind != "cuda" or isinstance(error, torch.OutOfMemoryError), f"{what}: {error!r}"
            else:
                raise AssertionError(f"{what}: 8 PiB were had without an error")
            hungry.at = None
            model.zero_grad()
            after = _allocated(kind, devices)
            kept = [now for now, was in zip(after, before) if now > was]
            assert not kept, f"{what}: {after} bytes are allocated after it, {before} were before"
            loss_of(model, x, y, schedule).backward()
            loss_of(plain, x, y).backward()
            gradients(model, plain, what)


def _allocated(kind: str, devices: int) -> list[int]:
    """Bytes on each device, where it counts them."""
    count = getattr(torch.get_device_module(kind), "memory_allocated", None)
    if count is None:
        return []
    gc.collect()
    kept = []
    for name in places(kind, devices, devices):
        # A failed backward raises before the engine's thread of a device has let go of it. That thread is through with
        # it when it has run another one, whose own tensors, the same at each count, live until the count is made.
        x, gradient = torch.zeros((), device=name, requires_grad=True), torch.zeros((), device=name)
        kept += [x, gradient, *torch.autograd.grad(x.view_as(x), x, gradient)]
        torch.accelerator.synchronize(name)
    return [count(torch.device(name)) for name in places(kind, devices, devices)]


def recorded(kind: str, devices: int) -> None:
    """A recording has the times of what ran on the devices, in order, and their memory."""
    model = wrapped(slow(2), kind, devices, "zb-h1")
    x, y = (torch.randn(16, WIDTH, device=model.devices[at]) for at in (0, -1))
    model(x, target=y).backward()
    with model.record() as timeline:
        for _ in range(3):
            model(x, target=y).backward()
    assert timeline.steps == 3, f"found {timeline.steps} steps, expected 3"
    assert timeline.makespan > 0, f"a step takes {timeline.makespan} ms"
    assert all(most for most in timeline.memory), f"memory is {timeline.memory}"
    for row in timeline.spans:
        assert all(end >= start for _, start, end in row), f"work ends before it starts: {row}"


def refilled(kind: str, devices: int) -> None:
    """A loop may fill its buffers in pinned memory again as soon as the call returns."""
    for schedule in None, "1f1b":
        with exact():
            torch.manual_seed(0)
            module = slow(2)
            plain = copy.deepcopy(module).to(places(kind, 1, 1)[0])
            model = wrapped(module, kind, devices, schedule)
            buffers = [torch.empty(10, WIDTH).pin_memory() for _ in range(2)]
            for _ in range(5):
                given = torch.randn(2, 10, WIDTH)
                for buffer, value in zip(buffers, given):
                    buffer.copy_(value)
                if schedule is None:
                    output = model(buffers[0])
                    buffers[0].fill_(torch.nan)
                    loss = squared(output, buffers[1].to(output.device))
                else:
                    loss = model(buffers[0], target=buffers[1])
                    for buffer in buffers:
                        buffer.fill_(torch.nan)
                loss.backward()
                loss_of(plain, given[0].to(places(kind, 1, 1)[0]), given[1]).backward()
            gradients(model, plain, f"refilled buffers, {schedule or 'drop-in'}")


_ELSEWHERE = """
import torch
from torch import nn
from splitpipe import SplitPipe
model = SplitPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [1, 1], devices=["cuda:1"] * 2, chunks=2)
model(torch.randn(4, 8, device="cuda:1")).sum().backward()
torch.cuda.synchronize(1)
assert not torch._C._cuda_hasPrimaryContext(0), "training on cuda:1 has made a context on cuda:0, half a GiB"
"""


def contexts(kind: str) -> None:
    """Who trains on the second GPU leaves the first one alone."""
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1:]


def _bind(function: Callable[..., None], **options: Any) -> Callable[[str], None]:
    return lambda kind: function(kind=kind, **options)


def _streams(kind: str, devices: int, count: int, **options: Any) -> None:
    """The devices are streams, of each class that there is."""
    for part in classes(kind):
        steps(kind, devices, count, part=part, **options)


def _count(devices: int) -> str:
    return "one device" if devices == 1 else f"{devices} devices"


def checks(count: int = 200) -> list[Check]:
    """All of them.

    Args:
        count: of steps on memory that is used again; a tenth of them with streams.
    """
    tenth = max(2, count // 10)
    found: list[Check] = []
    for devices in (1, 2):
        where = _count(devices)
        for schedule, checkpoint, backward in (
            (None, "never", "split"), (None, "except_last", "split"), (None, "never", "autograd"),
            ("zb-h1", "never", "split"), ("zb-v", "except_last", "split"),
        ):
            options: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, "backward": backward}
            way = f"{schedule or 'drop-in'}, {checkpoint}, {backward}, {where}"
            found += [
                Check(f"{count} steps: {way}", _bind(steps, devices=devices, count=count, **options), devices),
                Check(f"streams as devices: {way}", _bind(_streams, devices=devices, count=tenth, **options), devices),
                Check(f"a caller on streams of its own: {way}",
                      _bind(steps, devices=devices, count=tenth, own=True, **options), devices),
            ]
        found += [
            Check(f"dropout from a seed: {where}", _bind(repeated, devices=devices), devices),
            Check(f"out of memory: {where}", _bind(out_of_memory, devices=devices), devices),
            Check(f"a recording: {where}", _bind(recorded, devices=devices), devices),
            Check(f"a refilled buffer: {where}", _bind(refilled, devices=devices), devices),
        ]
    return [*found, Check("no context on another GPU", contexts, 2, "cuda")]


def layers(names: Sequence[str]) -> list[Check]:
    """The transparency grid's layers of these names, and modules with cuts: ``tests/devices/cases.py`` has the ways."""
    from tests.devices.modules import MODULES

    subjects = [*(f"layers: {name}" for name in names), *(f"module: {name}" for name in MODULES)]
    return [Check(name, partial(_every, name), only="cuda") for name in subjects]


def _every(subject: str, kind: str) -> None:
    from tests.devices.cases import of, wrong

    found = wrong(of(subject))
    assert not found, f"{len(found)} ways are wrong, such as {next(iter(found.items()))}"
