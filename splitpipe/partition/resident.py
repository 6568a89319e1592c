"""Modules that stay on the devices of their stages, whatever the user asks for; a shell around another module."""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence, Sized
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from typing_extensions import Self

from splitpipe.core.stream import Place
from splitpipe.core.torch_private import _parse_to
from splitpipe.schedule.plurals import counted

F = TypeVar("F", bound=Callable[..., Any])


class Resident(nn.Module):
    """A module on several devices; ``to`` changes dtypes and memory formats, but not devices."""

    _places: Sequence[Place]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A parent's .to(device) arrives here, like any change of all tensors: the dtype changes, the device doesn't.
        def at_home(x: Tensor) -> Tensor:
            y = fn(x)
            return y if y.device == x.device else x.to(y.dtype)

        self._apply_all(at_home, recurse)
        return self

    _apply_all: Callable[..., Any] = nn.Module._apply

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
        """Raises TypeError, as ``to(device)`` does."""
        return self if self._all_on(torch.device("cpu")) else self._deny("cpu()")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Raises TypeError, see ``to``."""
        self._deny("cuda()")

    def xpu(self, device: int | torch.device | None = None) -> Self:
        """Raises TypeError, see ``to``."""
        self._deny("xpu()")

    def _all_on(self, device: torch.device) -> bool:
        found = {place.device for place in self._places}
        if device.index is None and device.type != "cpu" and {each.type for each in found} == {device.type}:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        return found == {device}

    def _deny(self, what: str) -> NoReturn:
        devices = ", ".join(map(str, self._places))
        raise TypeError(
            f"{what} on a SplitPipe would put all its stages on one device: expected them to stay on {devices}. Choose "
            "other devices when wrapping, SplitPipe(module, ..., devices=[...]); to(dtype) is allowed."
        )


def _by_inner(method: F) -> F:
    """That method of nn.Module; of a module with cuts its own, because its class may have changed it."""

    @wraps(method)
    def found(self: Shell, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner
        if inner is None:
            return method(self, *args, **kwargs)
        value = getattr(inner, method.__name__)(*args, **kwargs)
        return self if value is inner else value

    return cast(F, found)


class Shell(Resident):
    """A module whose forward may be another module's, run as a pipeline."""

    train = _by_inner(nn.Module.train)
    eval = _by_inner(nn.Module.eval)
    apply = _by_inner(nn.Module.apply)
    requires_grad_ = _by_inner(nn.Module.requires_grad_)
    zero_grad = _by_inner(nn.Module.zero_grad)
    parameters = _by_inner(nn.Module.parameters)
    named_parameters = _by_inner(nn.Module.named_parameters)
    state_dict = _by_inner(nn.Module.state_dict)
    load_state_dict = _by_inner(nn.Module.load_state_dict)
    _save_to_state_dict = _by_inner(nn.Module._save_to_state_dict)
    _load_from_state_dict = _by_inner(nn.Module._load_from_state_dict)
    _apply_all = _by_inner(nn.Module._apply)

    def wrap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Wraps a module: its parameters, buffers, children and hooks become this one's, too."""
        internals = {name: vars(module)[name] for name in vars(nn.Module()) if name in vars(module)}
        # Not by nn.Module's __setattr__, which would register the module as a child.
        self.__dict__.update(internals, forward=forward, inner_module=module)

    def _stand_for(self, module: nn.Module) -> None:
        """Takes over an nn.Sequential's contents, so that both also see layers that are replaced later."""
        own = {name: value for name, value in vars(module).items() if name != "_compiled_call_impl"}
        self.__dict__.update(own, sequential_module=module)

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

    def __setattr__(self, name: str, value: Any) -> None:
        inner, own = self.inner, name in vars(self) or hasattr(type(self), name)
        there = not own and inner is not None and (name in vars(inner) or hasattr(type(inner), name))
        if there:
            setattr(inner, name, value)  # Its forward reads it there.
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self.inner is None or name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self.inner, name)

    def __len__(self) -> int:
        return len(self._modules) if self.inner is None else len(cast(Sized, self.inner))

    def __iter__(self) -> Iterator[nn.Module]:
        if self.inner is not None:
            return iter(cast("Iterable[nn.Module]", self.inner))
        return iter(cast("dict[str, nn.Module]", self._modules).values())

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        """The layer, or, for a slice, an nn.Sequential of layers, with the same names and devices."""
        if self.inner is not None:
            return cast("Sequence[nn.Module]", self.inner)[index]  # type: ignore[return-value]
        if isinstance(index, slice):
            part = nn.Sequential()
            part._modules.update([*cast("dict[str, nn.Module]", self._modules).items()][index])
            return part
        return cast("dict[str, nn.Module]", self._modules)[self._name(index)]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        """Replaces a layer. The next call moves it to its stage's device."""
        if self.inner is not None:
            cast("MutableSequence[nn.Module]", self.inner)[index] = module
        else:
            setattr(self, self._name(index), module)

    def _name(self, index: int) -> str:
        names, number = list(self._modules), operator.index(index)
        if not -len(names) <= number < len(names):
            raise IndexError(f"index {number} is out of range: the model has {counted(len(names), 'layer')}")
        return names[number]

    def __bool__(self) -> bool:
        return True  # There is no length unless the module has one.

    @property
    def training(self) -> bool:
        """Whether the module is in training mode. Both share the mode, whichever of them sets it."""
        return bool(vars(self if self.inner is None else self.inner).get("training", True))

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self if self.inner is None else self.inner)["training"] = mode


def plain(shell: Shell) -> nn.Module:
    """The module that a shell was given, in the shell's mode."""
    own = vars(shell)
    found: nn.Module = own["sequential_module"] if "sequential_module" in own else own["inner_module"]
    vars(found)["training"] = shell.training
    return found
