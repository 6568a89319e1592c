"""The variants that are compared: mechanisms of the drop-in pipeline switched off from outside, and schedules.

As torchgpipe's benchmark of its timeline does for itself, what makes up a mechanism is replaced by something that does
nothing; the package has no switch for it. What a model computes stays the same.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

import splitpipe.runtime.code  # noqa: F401 - every module that uses a mechanism is there by now
from splitpipe import SplitPipe, schedule
from splitpipe.core import transfer
from splitpipe.core.stream import Stream
from splitpipe.core.transfer import Port
from splitpipe.skip.box import Box, Key, opened
from splitpipe.skip.pairs import pops, stashes


@contextmanager
def _replaced(owner: ModuleType, **others: Any) -> Iterator[None]:
    """Inside the block every module of splitpipe has something else under a name that it has from its owner."""
    with ExitStack() as stack:
        for name, other in others.items():
            for module in [module for path, module in sys.modules.items() if path.startswith("splitpipe.")]:
                if vars(module).get(name) is getattr(owner, name) and module is not owner:
                    stack.enter_context(mock.patch.object(module, name, other))
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


@contextmanager
def without_dependency() -> Iterator[None]:
    """Microbatches go backward in whatever order autograd takes them: without sequence numbers."""
    with _replaced(transfer, rank=lambda x, number: None):
        yield


def _undivided(device: torch.device, compute: Stream, copy: Stream, order: Stream = None) -> Port:
    return Port(device, compute, copy=compute, order=compute)


@contextmanager
def without_streams() -> Iterator[None]:
    """Copies, and all around them, are on the streams that stages compute on."""
    with _replaced(transfer, Port=_undivided):
        yield


class Carrying(nn.Module):
    """A layer that is handed skips with its input, and hands them on with its output.

    Args:
        layer: skippable or not.
        arriving: the skips that come behind the input, in their order.
        leaving: those that go behind the output.
    """

    def __init__(self, layer: nn.Module, arriving: tuple[Key, ...], leaving: tuple[Key, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.arriving = arriving
        self.leaving = leaving

    def forward(self, input: Any) -> Any:
        """The layer's output; a tuple with the skips, where there are any."""
        value, *skips = input if self.arriving else (input,)
        box: Box = dict(zip(self.arriving, skips))
        with opened(box):
            value = self.layer(value)
        return (value, *(box[key] for key in self.leaving)) if self.leaving else value


def carried(layers: nn.Sequential) -> nn.Sequential:
    """The same layers, but that a skip is handed through all those between its stash and its pop.

    Example:
        >>> from splitpipe.skip import pop, skippable, stash
        >>> Stash, Pop = skippable(stash=["skip"])(nn.Identity), skippable(pop=["skip"])(nn.Identity)
        >>> [len(getattr(layer, "leaving", ())) for layer in carried(nn.Sequential(Stash(), nn.ReLU(), Pop()))]
        [1, 1, 0]
    """
    under_way: list[Key] = []
    found: list[nn.Module] = []
    for layer in layers:
        arriving, given, taken = tuple(under_way), stashes(layer), pops(layer)
        under_way = [key for key in under_way if key not in taken] + [key for key in given if key not in taken]
        found.append(Carrying(layer, arriving, tuple(under_way)) if arriving or under_way else layer)
    return nn.Sequential(*found)


#: What switches a mechanism off inside a block. It is asked for in forward alone, so backward may be outside.
OFF: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "dependency": without_dependency,
    "streams": without_streams,
}


@dataclass(frozen=True)
class Variant:
    """One way to train a model.

    Attributes:
        name: as in the tables.
        off: mechanisms that it does without: "dependency", "streams", "skips".
        backward: of SplitPipe.
        schedule: the name of one that goes backward inside the forward; None for the drop-in pipeline.
    """

    name: str
    off: tuple[str, ...] = ()
    backward: Literal["split", "autograd"] = "split"
    schedule: str | None = None


def variants(schedules: Sequence[str]) -> list[Variant]:
    """As in the paper of torchgpipe (arXiv 2004.09910, section 5.4), and on: each has what those before it have.

    Then the drop-in pipeline without one mechanism each.

    Args:
        schedules: names of those to compare.
    """
    added = [
        Variant("baseline", ("dependency", "streams", "skips"), "autograd"),
        Variant("+ dependency", ("streams", "skips"), "autograd"),
        Variant("+ streams", ("skips",), "autograd"),
        Variant("+ skips", (), "autograd"),
        Variant("+ split"),
    ]
    added += [Variant(f"+ schedule: {name}", schedule=name) for name in schedules]
    return added + [Variant(f"split, without {name}", (name,)) for name in ("dependency", "streams", "skips")]


@dataclass(frozen=True)
class Case:
    """The model that is trained.

    Attributes:
        layers: the model.
        input: a batch.
        target: of the output's shape.
        balance: gives the layers a stage for a number of stages.
    """

    layers: nn.Sequential
    input: Tensor
    target: Tensor
    balance: Callable[[int], list[int]]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return (output - target).square().mean()


class Training:
    """A variant at work on a copy of a case's layers.

    Args:
        variant: the way to train.
        case: what is trained.
        devices: of SplitPipe.
        chunks: microbatches.
        checkpoint: of SplitPipe.
    """

    def __init__(self, variant: Variant, case: Case, devices: Sequence[Any], chunks: int, checkpoint: str) -> None:
        self.variant = variant
        layers = copy.deepcopy(case.layers)
        count = len(devices)
        more: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint, "backward": variant.backward}
        if variant.schedule is not None:
            built = schedule.build(variant.schedule, count, chunks)
            count = built.stages
            more.update(schedule=built, loss_fn=loss_fn)
        if "skips" in variant.off:
            layers = carried(layers)
        self.model = SplitPipe(layers, case.balance(count), devices=list(devices), **more)
        wanted = case.input.requires_grad
        self._input = case.input.detach().to(self.model.devices[0]).requires_grad_(wanted)
        self._target = case.target.to(self.model.devices[-1])

    def step(self) -> Tensor:
        """Forward and backward; the loss."""
        self.model.zero_grad(set_to_none=True)
        self._input.grad = None
        with ExitStack() as stack:
            for name in self.variant.off:
                if name in OFF:
                    stack.enter_context(OFF[name]())
            if self.variant.schedule is None:
                loss = loss_fn(self.model(self._input), self._target)
            else:
                loss = self.model(self._input, target=self._target)
            loss.backward()
        return loss.detach()

    def results(self) -> list[Tensor]:
        """Loss and gradients of a step."""
        loss = self.step()
        return [loss, *(_given(parameter) for parameter in self.model.parameters())]


def expected(case: Case, chunks: int) -> list[Tensor]:
    """Loss and gradients of the layers without a pipeline, microbatch by microbatch."""
    layers = copy.deepcopy(case.layers)
    loss = torch.zeros((), dtype=case.input.dtype, device=case.input.device)
    for x, y in zip(case.input.detach().chunk(chunks), case.target.chunk(chunks)):
        part = loss_fn(layers(x), y) * (len(x) / len(case.input))
        part.backward()
        loss += part.detach()
    return [loss, *(_given(parameter) for parameter in layers.parameters())]


def _given(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


#: How far losses and gradients may be apart, relatively: they are sums over a batch or over its microbatches.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}


def strayed(case: Case, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[str]:
    """A line for each result of a variant that is not that of the layers without a pipeline."""
    names = ["the loss", *(f"the gradient of {name}" for name, _ in case.layers.named_parameters())]
    found = []
    for name, got, wanted in zip(names, ours, theirs, strict=True):
        apart, close = float((got.to(wanted.device) - wanted).norm() / wanted.norm()), CLOSE[wanted.dtype]
        if not apart <= close:
            found.append(f"{name} is {apart:.1e} off, relatively: expected {close:.0e} at most")
    return found
