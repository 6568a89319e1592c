"""Modules that stay on the devices of their stages, whatever their user asks for; a shell around another module."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import Self

from splitpipe.core.stream import Place
from splitpipe.core.torch_private import _parse_to


class Resident(nn.Module):
    """A module on several devices; ``to`` changes dtypes and memory formats, and no device."""

    _places: Sequence[Place]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A parent's .to(device) arrives here, like any change of all tensors: the dtype changes, the device does not.
        def at_home(x: Tensor) -> Tensor:
            y = fn(x)
            return y if y.device == x.device else x.to(y.dtype)

        nn.Module._apply(self, at_home, recurse)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Converts parameters and buffers to a dtype or memory format, as nn.Module's does.

        Raises:
            TypeError: for a device other than the one that all stages are on.
        """
        device = _parse_to(*args, **kwargs)[0]
        if device is not None and not self._all_on(device):
            self._deny(f"to({device})")
        return super().to(*args, **kwargs)

    def cpu(self) -> Self:
        """Refused, as ``to(device)`` is."""
        return self if self._all_on(torch.device("cpu")) else self._deny("cpu()")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Refused, see ``to``."""
        self._deny("cuda()")

    def xpu(self, device: int | torch.device | None = None) -> Self:
        """Refused, see ``to``."""
        self._deny("xpu()")

    def _all_on(self, device: torch.device) -> bool:
        found = {place.device for place in self._places}
        if device.index is None and device.type != "cpu" and {each.type for each in found} == {device.type}:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        return found == {device}

    def _deny(self, what: str) -> NoReturn:
        devices = ", ".join(map(str, self._places))
        raise TypeError(
            f"{what} on a SplitPipe would put all its stages on one device: expected them to stay on {devices}. Name "
            "other devices when wrapping, SplitPipe(module, ..., devices=[...]); to(dtype) is allowed."
        )


class Shell(Resident):
    """A module whose forward may be another one's, run as a pipeline."""

    def wrap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Stands around a module: its parameters, buffers, children and hooks are this one's, too."""
        internals = {name: vars(module)[name] for name in vars(nn.Module()) if name in vars(module)}
        # Past nn.Module, which would take the module for a child.
        self.__dict__.update(internals, forward=forward, inner_module=module)

    @property
    def inner(self) -> nn.Module | None:
        """The module with cuts; None if this is a pipeline of layers."""
        return vars(self).get("inner_module")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.inner is None:
                raise
            return getattr(self.inner, name)  # config, generate, save_pretrained

    def __bool__(self) -> bool:
        return True  # There is no length, unless the module has one.

    @property
    def training(self) -> bool:
        """Whether the module is in training mode: one for both, however it is set."""
        return bool(vars(self if self.inner is None else self.inner).get("training", True))

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self if self.inner is None else self.inner)["training"] = mode
