"""Faults at known places: layers that fail in any kind of op, of any stage and microbatch, in any way.

A place is met by ``Fault.meet``, called where an op of that kind is at work. A step that is listened to says which
places there are; an armed fault goes off at one of them, once.
"""
from __future__ import annotations

import _thread
import os
import signal
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import is_recomputing
from splitpipe.skip import pop, skippable, stash
from tests.helpers.deferring import Scale


class Special(BaseException):
    """No Exception, and none of Python's own."""


#: What an op may raise.
ERRORS: tuple[type[BaseException], ...] = (ValueError, Special, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError)


def _kill() -> None:
    """Ends when a thread has the signal: one that is late would come after the step."""
    os.kill(os.getpid(), signal.SIGINT)
    while signal.SIGINT in signal.sigpending():
        pass


#: SIGINT as the user's Ctrl-C sends it, as a thread of the process does, and as Python alone sees it.
SIGNALS: dict[str, Callable[[], None]] = {"os.kill": _kill,
                                          "raise_signal": lambda: signal.raise_signal(signal.SIGINT),
                                          "interrupt_main": lambda: _thread.interrupt_main()}


class Place(NamedTuple):
    """Where a fault may be: the mark is the first row of its microbatch; None for what is no microbatch's."""

    kind: str
    stage: int
    mark: Hashable = None


@dataclass
class Fault:
    """Goes off once, at one place, if it is armed for it."""

    at: Place | None = None
    act: Callable[[], None] | None = None
    fired: Place | None = None  # Where it has gone off.
    heard: dict[Place, None] | None = None  # The places that were met while it listened.

    def arm(self, at: Place, act: Callable[[], None]) -> None:
        self.at, self.act, self.fired = at, act, None

    def meet(self, kind: str, stage: int, mark: Hashable = None) -> None:
        place = Place(kind, stage, mark)
        if self.heard is not None:
            self.heard[place] = None
        if self.at == place:
            act, self.at, self.act, self.fired = self.act, None, None, place
            assert act is not None
            act()

    @contextmanager
    def listening(self) -> Iterator[dict[Place, None]]:
        """The places that the block meets."""
        self.heard = {}
        try:
            yield self.heard
        finally:
            self.heard = None


def throws(error: BaseException) -> Callable[..., Any]:
    """Raises the error, whatever it is given."""

    def act(*_: Any) -> None:
        raise error

    return act


class Meeting(Scale):
    """Meets a kind of op in each half of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any, **options: Any) -> Tensor:
        ctx.meet = options["meet"]
        return Scale.forward(ctx, x, *weights)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.meet("input")
        return Scale.backward_input(ctx, grad_output)

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.meet("weight")
        return Scale.backward_weight(ctx, grad_output)


@dataclass(eq=False)
class Meets:
    """The places of one layer."""

    fault: Fault
    stage: int

    def of(self, rows: Tensor) -> Callable[[str], None]:
        """Meets a kind of op of the microbatch with these rows."""
        mark = int(rows[0])
        return lambda kind: self.fault.meet(kind, self.stage, mark)

    def hooked(self, x: Tensor, kind: str, rows: Tensor) -> None:
        """Meets a kind of op when the tensor's gradient is there."""
        if x.requires_grad:
            meet = self.of(rows)
            x.register_hook(lambda _: meet(kind))


class Fragile(nn.Module):
    """Fails in forward, in recomputation, in hooks, in backward functions.

    Its norm sees the input and changes nothing, so that its statistics are all that microbatches could spoil.
    """

    def __init__(self, fault: Fault, stage: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.meets = Meets(fault, stage)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, rows = value
        meet = self.meets.of(rows)
        self.norm(x.detach())
        meet("recomputation" if is_recomputing() else "forward")
        x = self.linear(x).tanh()
        self.meets.hooked(x, "tensor hook", rows)
        return Meeting.apply(x, self.weight, meet=meet), rows


class Met(nn.Module):
    """A layer with places."""

    def __init__(self, fault: Fault, stage: int) -> None:
        super().__init__()
        self.meets = Meets(fault, stage)


@skippable(stash=["kept"])
class Keep(Met):
    """Fails before it stashes, and when the gradient of that comes back."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        x, rows = value
        kept = x.sin()
        self.meets.hooked(kept, "stashed hook", rows)
        self.meets.of(rows)("stash")
        yield stash("kept", kept)
        return x.cos(), rows


@skippable(pop=["kept"])
class Add(Met):
    """Fails with the skip in its hands."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        x, rows = value
        kept = yield pop("kept")
        self.meets.of(rows)("pop")
        return x + kept * 2, rows


class Loss:
    """Fails with the output in its hands."""

    def __init__(self, fault: Fault, stage: int) -> None:
        self.meets = Meets(fault, stage)

    def __call__(self, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        y, rows = output
        self.meets.of(rows)("loss")
        return F.mse_loss(y.to(target.dtype), target)


def fragile(stages: int, width: int = 4) -> tuple[nn.Sequential, list[int], Fault]:
    """Layers of so many stages, with a skip from the first to the last; their balance; the fault in them."""
    fault = Fault()
    layers: list[nn.Module] = [Fragile(fault, stage, width) for stage in range(stages)]
    module = nn.Sequential(layers[0], Keep(fault, 0), *layers[1:-1], Add(fault, stages - 1), layers[-1])
    return module, [2, *[1] * (stages - 2), 2], fault


def watch(module: nn.Module, fault: Fault) -> list[Any]:
    """Sets hooks on parameters, that fail when the gradient is there and when it has been added; gives the handles."""
    handles: list[Any] = []
    for layer in module.modules():
        if isinstance(layer, Fragile):
            meet = partial(fault.meet, stage=layer.meets.stage)
            handles.append(layer.linear.weight.register_hook(lambda _, meet=meet: meet("parameter hook")))
            after = layer.weight.register_post_accumulate_grad_hook
            handles.append(after(lambda _, meet=meet: meet("accumulated hook")))
    return handles
