"""What the modules of a stage have: parameters, buffers, train or eval modes, looked through in lists.

A pass asks for each microbatch, so nothing here is done a module at a time that can be done for all at once.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from splitpipe.core.tensors import is_plain
from splitpipe.stage.saved import version_of

Owner = Mapping[str, Tensor | None]
#: Which of the modules' tables, and a name in it.
Slot = tuple[int, str]
#: What is in a slot that is not there.
ABSENT = object()


@dataclass(frozen=True)
class Found:
    """A parameter in its module's slot, at its version."""

    layer: str
    owner: Owner
    name: str
    tensor: Tensor
    version: int | None  # None: not there yet, a lazy module's first forward makes it.
    address: int  # Another one, at the same version: somebody set ``tensor.data``.
    requires_grad: bool


class Slots(NamedTuple):
    """What modules have, each of them in turn."""

    held: list[dict[str, Any]]
    names: list[str]
    values: list[Any]
    sizes: list[int]

    def alike(self, other: Slots) -> bool:
        """Whether these are the same slots, whatever is in them."""
        return self.names == other.names and self.sizes == other.sizes

    def same(self, other: Slots) -> bool:
        """Whether the same things are in the same slots."""
        return self.alike(other) and all(map(is_, self.values, other.values))

    def put(self) -> None:
        """Puts everything where it was."""
        for held, then in zip(self.held, self._each()):
            if held.keys() != then.keys() or any(held[name] is not then[name] for name in then):
                held.clear()
                held.update(then)

    def moved(self, now: Slots) -> dict[Slot, tuple[Any, Any]]:
        """What is in each slot that has changed, then and now; ABSENT where there is no slot."""
        return {
            (k, name): (then.get(name, ABSENT), later.get(name, ABSENT))
            for k, (then, later) in enumerate(zip(self._each(), now._each()))
            for name in then.keys() | later.keys()
            if then.get(name, ABSENT) is not later.get(name, ABSENT)
        }

    def _each(self) -> Iterator[dict[str, Any]]:
        at = 0
        for size in self.sizes:
            yield dict(zip(self.names[at : at + size], self.values[at : at + size]))
            at += size


class Inventory:
    """The modules of a stage, looked through once a pass.

    Args:
        layers: name and module of each layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = layers
        self._named = list(_modules(layers))
        self._modules = [module for _, module in self._named]
        self.modes = self.training()
        #: Whether a module is compiled: by torch.compile(module) or module.compile().
        self.compiled = any([
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            for module in self._modules
        ])
        #: Whether the kernel of each module writes to its buffers without their versions telling.
        self.silent = [isinstance(module, _NormBase) for module in self._modules]
        self.held: list[dict[str, Any]] = [
            held for module in self._modules for held in (module._parameters, module._buffers, module._modules)
        ]

    def parameters(self) -> list[Found]:
        """The parameters as they are now."""
        return [
            _found(layer, module._parameters, name, tensor)
            for layer, module in self._named
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]

    def buffers(self) -> Slots:
        """The buffers as they are now; None for those that are yet to be made, or that nobody counts versions of."""
        found = _slots(self.held[1::3])
        return found._replace(values=[x if x is None or _counted(x) else None for x in found.values])

    def slots(self) -> Slots:
        """All parameters, buffers and modules as they are now."""
        return _slots(self.held)

    def renewed(self) -> Inventory:
        """The inventory of the modules that there are now."""
        return Inventory(self._layers)

    def training(self) -> tuple[bool, ...]:
        """The modules' train or eval modes as they are now."""
        return tuple([module.training for module in self._modules])

    def train(self, modes: Iterable[bool]) -> None:
        """Puts the modules into their modes."""
        for module, mode in zip(self._modules, modes):
            module.training = mode


def _slots(held: list[dict[str, Any]]) -> Slots:
    values = chain.from_iterable(map(methodcaller("values"), held))
    return Slots(held, list(chain.from_iterable(held)), list(values), list(map(len, held)))


def _counted(buffer: Tensor) -> bool:
    return not is_lazy(buffer) and version_of(buffer) is not None


def _modules(layers: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()
    for name, layer in layers:
        stack = [layer]
        while stack:
            module = stack.pop()
            if module not in seen:
                seen.add(module)
                yield name, module
                stack.extend(child for child in module._modules.values() if child is not None)


class Parameters:
    """The parameters of a stage, as a pass found them.

    Args:
        found: each of them.
    """

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found
        self.tensors = [one.tensor for one in found]
        self._flags = self.flags()
        self._there = [one.tensor for one in found if one.version is not None]
        self._versions = [one.version for one in found if one.version is not None]
        self._addresses = [one.address for one in found if one.version is not None]

    def verify(self) -> None:
        """Raises a RuntimeError if one was written to since."""
        if [x._version for x in self._there] != self._versions or list(map(_address, self._there)) != self._addresses:
            for found in self._found:
                _verify(found)

    def flags(self) -> list[bool]:
        """Which require grad now."""
        return [x.requires_grad for x in self.tensors]

    def require(self, flags: Sequence[bool] | None = None) -> None:
        """Has those require grad that did, or that are said to."""
        for x, flag in zip(self.tensors, self._flags if flags is None else flags):
            if x.requires_grad != flag:
                x.requires_grad_(flag)


def _found(layer: str, owner: Owner, name: str, tensor: Tensor) -> Found:
    if is_lazy(tensor):
        return Found(layer, owner, name, tensor, None, 0, tensor.requires_grad)
    return Found(layer, owner, name, tensor, tensor._version, _address(tensor), tensor.requires_grad)


def _address(tensor: Tensor) -> int:
    # A subclass may have no memory of its own (DTensor); its version still tells.
    return tensor.data_ptr() if is_plain(tensor) else 0


def _verify(found: Found) -> None:
    if found.version is None:
        return
    if found.tensor._version != found.version or _address(found.tensor) != found.address:
        raise RuntimeError(
            f"parameter {found.name!r} of layer {found.layer!r} was modified in place between the forward and its "
            f"recomputation (version {found.version} then, {found.tensor._version} now): expected the values that the "
            "forward saw. Call backward before optimizer.step(); for a layer that writes to its parameters in its own "
            "forward, as nn.Embedding(max_norm=...) does, use checkpoint='never'."
        )
