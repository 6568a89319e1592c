"""Which stage a module belongs to, and thus where its parameters and buffers are: the first stage that calls it.

The first call finds that out, microbatch by microbatch in one thread: before a stage calls a module, it moves the
module to its device. So nothing is run twice, and a model that is too large for any device goes from the CPU to the
devices piece by piece. With a sample, a rehearsal on one row finds it before.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from splitpipe.core.stream import Place
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.partition.moving import moved
from splitpipe.partition.restore import restore_after


class Placement:
    """The stage of each module."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._devices = [place.device for place in places]
        self.devices = {*self._devices}
        self.several = len(self.devices) > 1
        # Weak references, since the module's forward refers to this.
        self.stage_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        #: The modules that each stage has called.
        self.called: list[WeakKeyDictionary[nn.Module, None]] = [WeakKeyDictionary() for _ in places]
        #: Where tensors belong: with the first of the modules that have them.
        self.homes: dict[int, tuple[Tensor, torch.device]] = {}
        #: What ``settle`` returned, by the called module's identity and the stage.
        self._settled: dict[tuple[int, int], bool] = {}
        #: True when a call has completed, and one in training mode: everything that such calls use is in place.
        self.complete = self.trained = False

    def prepare(self, module: nn.Module, same: bool) -> None:
        """Before a call; ``same``: whether it has the parts that it had. What was moved since will go home again."""
        if not same:
            self.homes.clear()
        away = any([x.device != home for x, home in self.homes.values()])
        if away and same and self.complete:
            warnings.warn(
                "parameters were moved from their stages' devices, as by model.cuda(), and are moved back: expected a "
                "pipeline that stays where it is, or splitpipe.detach(model, device).", stacklevel=6,
            )
        if not same or away:
            self._settled.clear()
            for part in () if self.several else module.modules():
                self._bring(part, self._devices[0])

    def settle(self, module: nn.Module, whole: bool, stage: int) -> bool:
        """Assigns a module that a stage calls, or (``whole``) those parts of it that have no stage yet, to the stage.

        Returns True if all their tensors are on the stage's device.
        """
        local = self._settled.get((id(module), stage))
        if local is None:
            self.called[stage][module] = None
            local = True
            for part in module.modules() if whole else [module]:
                home = self.stage_of.get(part, stage)
                if self.several:
                    self._bring(part, self._devices[home])
                    local = local and all([x.device == self._devices[stage] for x in _own(part)])
                self.stage_of[part] = home  # Only now, so that what couldn't be moved has no stage.
            self._settled[id(module), stage] = local
        return local

    def _bring(self, part: nn.Module, device: torch.device) -> None:
        for x in _own(part):
            self.homes.setdefault(id(x), (x, device))
        if any([x.device != self.homes[id(x)][1] for x in _own(part)]):
            with DisableTorchFunction():  # Unseen by function modes.
                part._apply(lambda x: moved(x, self.homes.get(id(x), (x, x.device))[1]), recurse=False)

    def is_elsewhere(self, x: Tensor, stage: int) -> bool:
        """True for a tensor on another stage's device, and for a parameter on no stage's device."""
        if not self.several or x.device == self._devices[stage]:
            return False
        return x.device in self.devices or isinstance(x, Parameter)

    def stage_on(self, device: torch.device, before: int) -> int:
        """The last stage before the given one that is on a device, or else the first after it."""
        stages = [stage for stage, own in enumerate(self._devices) if own == device]
        return max([stage for stage in stages if stage < before], default=min(stages, default=0))


def _own(part: nn.Module) -> list[Tensor]:
    return [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]


def verify_filled(module: nn.Module) -> None:
    """Raises for a module with parameters or buffers that have no data, as those that accelerate keeps elsewhere."""
    empty = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if x.is_meta]
    if empty:
        raise ValueError(
            f"{', '.join(map(repr, empty[:3]))}{' and others' if empty[3:] else ''} are on meta and have no data: "
            "expected weights on the CPU or the devices. Load the model without device_map, or with "
            "device_map=splitpipe.device_map(model, devices)."
        )


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
