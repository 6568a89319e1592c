"""Which stage a module belongs to, and moves of its parameters and buffers to that stage's device, as the same objects.

Layers of an nn.Sequential belong to stages by balance. Any other module's part belongs to the first stage that calls
it. The first call finds that out, microbatch by microbatch in one thread: before a stage calls a module, it moves the
module to its device. So nothing is run twice, and a model that is too large for any device goes from the CPU to the
devices piece by piece. With a sample, a rehearsal on one row finds it before.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import swap_tensors

from splitpipe.core.stream import Place
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.partition.resident import is_pipeline
from splitpipe.partition.restore import restore_after

T = TypeVar("T")


def by_stage(layers: Iterable[T], balance: Sequence[int]) -> list[list[T]]:
    """The layers of each stage, by the number of them."""
    rest = iter(layers)
    return [[*islice(rest, number)] for number in balance]


def verify_stages(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Raises for a parameter or buffer that stages on different devices share."""
    first: dict[int, int] = {}  # The first stage of each tensor, by identity.
    for stage, layer in [(stage, layer) for stage, layers in enumerate(stages) for layer in layers]:
        for name, x in (*layer.named_parameters(), *layer.named_buffers()):
            home = first.setdefault(id(x), stage)
            if places[home].device != places[stage].device:
                raise ValueError(
                    f"{type(layer).__name__}.{name} of stage {stage} ({places[stage]}) is also in stage {home} "
                    f"({places[home]}): expected layers that share a tensor in one stage, or in stages on one device. "
                    "Choose another balance, or give each layer a separate copy (copy.deepcopy)."
                )


def move_stages(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Moves each stage's layers to its device. Raises for a parameter or buffer that several devices' stages share."""
    verify_stages(stages, places)
    for stage, place in zip(stages, places):
        for layer in stage:
            move(layer, place.device)


def move(module: nn.Module, device: torch.device) -> None:
    """Moves a module, but no pipelines inside it, to a device."""
    # Not module.to(device), which may raise if a part places its tensors itself.
    module._apply(lambda x: moved(x, device), recurse=False)
    for child in module.children():
        if not is_pipeline(child):
            move(child, device)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """The tensor itself, on another device."""
    if x.device == device or not x.is_leaf:
        return x
    with torch.inference_mode(False), torch.no_grad():  # The first call may be in inference mode, others not.
        y, grad = x.to(device), None if x.grad is None else x.grad.to(device)
        _replace(x, y)
        x.grad = grad
    return x


def _replace(x: Tensor, y: Tensor) -> None:
    """Gives a tensor another one's contents, and keeps its hooks."""
    # Of a tensor that contains others, such as a quantised weight and its scales, these aren't part of its .data.
    if type(x).to is Tensor.to and not hasattr(x, "__tensor_flatten__"):
        try:
            x.data = y
            return
        except RuntimeError:  # Some devices' tensors are of another kind.
            pass
    if y is x:  # A weight may be quantised in place when it is moved.
        return
    hooks, later = x._backward_hooks, x._post_accumulate_grad_hooks
    if isinstance(x, Parameter) and not isinstance(y, Parameter):
        y = Parameter(y, x.requires_grad)
    swap_tensors(x, y)
    x._backward_hooks, x._post_accumulate_grad_hooks = hooks, later


class Placement:
    """The stage of each module."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.devices = [place.device for place in places]
        self.several = len({*self.devices}) > 1
        # Weak references, since the module's forward refers to this.
        self.stage_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        #: The modules that each stage has called, and what ``settle`` returned.
        self.called: list[WeakKeyDictionary[nn.Module, bool]] = [WeakKeyDictionary() for _ in places]
        #: Where tensors belong: with the first of the modules that have them.
        self.homes: dict[int, tuple[Tensor, torch.device]] = {}

    def begin(self, module: nn.Module) -> None:
        """Before a call of a module that has other parts than before."""
        self.homes, self.called = {}, [WeakKeyDictionary() for _ in self.devices]
        for part in () if self.several else module.modules():
            self._bring(part, self.devices[0])

    def settle(self, module: nn.Module, is_block: bool, stage: int) -> bool:
        """Assigns a module that a stage calls, or (``is_block``) its parts that have no stage yet, to the stage.

        Returns True if all their tensors are on the stage's device.
        """
        local = self.called[stage].get(module)
        if local is None:
            local = True
            for part in module.modules() if is_block else [module]:
                home = self.stage_of.get(part, stage)
                self._bring(part, self.devices[home])
                local = local and all([x.device == self.devices[stage] for x in _own(part)])
                self.stage_of[part] = home  # Only now, so that what couldn't be moved has no stage.
            self.called[stage][module] = local
        return local

    def _bring(self, part: nn.Module, device: torch.device) -> None:
        own = [x for x in _own(part) if x.is_leaf]  # Others are of one call, whose graph they would keep.
        for x in own:
            self.homes.setdefault(id(x), (x, device))
        if any([x.device != self.homes[id(x)][1] for x in own]):
            with DisableTorchFunction():  # Unseen by function modes.
                part._apply(lambda x: moved(x, self.homes.get(id(x), (x, x.device))[1]), recurse=False)

    def is_elsewhere(self, x: Tensor, stage: int) -> bool:
        """True for a tensor on another stage's device, and for a parameter on no stage's device."""
        return x.device != self.devices[stage] and (x.device in self.devices or isinstance(x, Parameter))

    def stage_on(self, device: torch.device, before: int) -> int:
        """The last stage before the given one that is on a device, or else the first after it."""
        stages = [stage for stage, own in enumerate(self.devices) if own == device]
        return max([stage for stage in stages if stage < before], default=min(stages, default=0))


def _own(part: nn.Module) -> list[Tensor]:
    return [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]


def arguments_of(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: a dict by name, a tuple in order, or one alone."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if not isinstance(sample, (tuple, Tensor)):
        raise TypeError(f"sample is a {type(sample).__name__}: expected a call's arguments, a dict, tuple or tensor.")
    return sample if isinstance(sample, tuple) else (sample,), {}


@contextmanager
def rehearsal(module: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """For a call on one row in eval mode without gradients, which leaves no trace."""
    with restore_after([*module.modules()], devices), torch.no_grad():
        for part in module.modules():
            vars(part)["training"] = False
        yield
