"""A stage's parameters and buffers as one microbatch found them, put back while it is recomputed.

Forward may write to buffers (BatchNorm counts, spectral norm iterates), and ``torch.func.functional_call`` swaps
parameters for the time of the forward alone. A recomputation that took what is there in backward would count twice,
or differentiate another function.

A clone of a buffer serves every microbatch that finds the buffer at the same version. Some kernels (BatchNorm's)
write without moving the version; a stage's first run compares values, and such buffers are cloned each time.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

Owner = Mapping[str, Tensor | None]


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

    names: list[str]
    values: list[Tensor | None]
    sizes: list[int]

    def alike(self, other: Slots) -> bool:
        """Whether these are the same slots, whatever is in them."""
        return self.names == other.names and self.sizes == other.sizes

    def same(self, other: Slots) -> bool:
        """Whether the same tensors are in the same slots."""
        return self.alike(other) and all(map(is_, self.values, other.values))


class Inventory:
    """The modules of a stage, looked through once a pass.

    Args:
        layers: name and module of each layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
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
        self._held: list[Any] = [
            held for module in self._modules for held in (module._parameters, module._buffers)
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
        found = _slots(self._held[1::2])
        return found._replace(values=[x if x is None or _counted(x) else None for x in found.values])

    def slots(self) -> Slots:
        """All parameters and buffers as they are now."""
        return _slots(self._held)

    def put(self, slots: Slots) -> None:
        """Puts parameters and buffers where they were."""
        at = 0
        for held, size in zip(self._held, slots.sizes):
            then = dict(zip(slots.names[at : at + size], slots.values[at : at + size]))
            if held.keys() != then.keys() or any(held[name] is not then[name] for name in then):
                held.clear()
                held.update(then)
            at += size

    def training(self) -> tuple[bool, ...]:
        """The modules' train or eval modes as they are now."""
        return tuple([module.training for module in self._modules])

    def train(self, modes: Iterable[bool]) -> None:
        """Puts the modules into their modes."""
        for module, mode in zip(self._modules, modes):
            module.training = mode


def _slots(held: list[Any]) -> Slots:
    values = chain.from_iterable(map(methodcaller("values"), held))
    return Slots(list(chain.from_iterable(held)), list(values), list(map(len, held)))


def _counted(buffer: Tensor) -> bool:
    return not is_lazy(buffer) and not buffer.is_inference()


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


class Taken(NamedTuple):
    """Buffers as a microbatch found them, each list in the order of their slots. No object a buffer: see Frame."""

    tensors: list[Tensor | None]
    versions: list[int]
    clones: list[Tensor | None]
    #: Which are known to change without their version telling; it may become known later.
    silent: list[bool]

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that were written to since, and what they were."""
        return [
            (tensor, clone)
            for tensor, version, clone, silent in zip(*self)
            if tensor is not None and clone is not None and (silent or tensor._version != version)
        ]


@dataclass
class Clones:
    """Clones of a stage's buffers, kept from pass to pass."""

    _slots: Slots | None = None
    _taken: Taken = field(default_factory=lambda: Taken([], [], [], []))

    def take(self, slots: Slots, modules: Sequence[bool], fresh: bool = False) -> Taken:
        """The buffers as they are now, with a clone of each.

        Args:
            slots: with the buffers.
            modules: whether each module's buffers are known to be silent.
            fresh: whether clones are to be new ones.
        """
        if self._slots is None or not slots.alike(self._slots):
            nothing = [None] * len(slots.values)
            known = [quiet for quiet, size in zip(modules, slots.sizes) for _ in range(size)]
            # Nobody has looked whether a buffer tells that the stage's first run did not find.
            later = self._slots is not None
            silent = [later or quiet or x is None for quiet, x in zip(known, slots.values)]
            self._taken = Taken([*nothing], [0] * len(nothing), [*nothing], silent)
        self._slots = slots
        before = self._taken
        versions = [0 if x is None else x._version for x in slots.values]
        clones = [
            clone if x is then and version == at and not silent and not fresh else None if x is None else _clone(x)
            for x, version, then, at, clone, silent in zip(slots.values, versions, *before)
        ]
        self._taken = Taken(slots.values, versions, clones, before.silent)
        return self._taken

    def compare(self, taken: Taken) -> None:
        """Learns which buffers have changed without their version telling."""
        for k, (x, version, clone, silent) in enumerate(zip(*taken)):
            if x is not None and clone is not None and not silent and x._version == version and _strided(x):
                taken.silent[k] = not torch.equal(x, clone)


class Snapshot:
    """Parameters, buffers and train or eval modes at the start of one microbatch.

    Args:
        inventory: of the stage.
        parameters: as the pass found them.
        clones: of the stage's buffers.
        fresh: whether it is the stage's first run, or the first one in these modes: to be compared.
    """

    def __init__(self, inventory: Inventory, parameters: Parameters, clones: Clones, fresh: bool = False) -> None:
        self._inventory = inventory
        self._parameters = parameters
        self._clones = clones
        self._buffers = clones.take(inventory.buffers(), inventory.silent, fresh)
        self._slots = inventory.slots()

    def compare(self) -> None:
        """To be called after a stage's first run."""
        self._clones.compare(self._buffers)

    def _made_since(self) -> list[Tensor]:
        """Buffers of lazy modules, which were made by the forward: there is nothing to put back but what is now."""
        before = self._buffers.tensors
        if all([x is not None for x in before]):
            return []
        now = self._inventory.buffers().values
        return [x for x, then in zip(now, before) if then is None and x is not None] if len(now) == len(before) else []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All is as it was inside the block, and as it is now after it.

        Mostly it is already, which is looked at in lists, for all modules at once.

        Raises:
            RuntimeError: a parameter was written to since; what forward computed with is gone.
        """
        inventory, parameters = self._inventory, self._parameters
        parameters.verify()
        now, flags, modes = inventory.slots(), parameters.flags(), inventory.training()
        written = self._buffers.written()
        values = [(tensor, _clone(tensor)) for tensor in (*(x for x, _ in written), *self._made_since())]
        try:
            if modes != inventory.modes:
                inventory.train(inventory.modes)
            if not now.same(self._slots):
                inventory.put(self._slots)
            parameters.require()
            _write(written)
            yield
        finally:
            _write(values)
            parameters.require(flags)
            if not now.same(inventory.slots()):
                inventory.put(now)
            if modes != inventory.training():
                inventory.train(modes)


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone()


def _write(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Writes to buffers, all in few kernels."""
    # Through .data: a buffer that autograd saved elsewhere keeps its version, as it keeps its values.
    plain = [(tensor.data, value) for tensor, value in values if _strided(tensor)]
    if plain:
        torch._foreach_copy_(*map(list, zip(*plain)))  # type: ignore[arg-type]
    for tensor, value in values:
        if tensor.layout is not torch.strided:  # Its .data has indices of its own.
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)
        elif not _strided(tensor):
            tensor.data.copy_(value)


def _strided(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Buffer) and x.layout is torch.strided and not x.is_nested


def _found(layer: str, owner: Owner, name: str, tensor: Tensor) -> Found:
    if is_lazy(tensor):
        return Found(layer, owner, name, tensor, None, 0, tensor.requires_grad)
    return Found(layer, owner, name, tensor, tensor._version, _address(tensor), tensor.requires_grad)


def _address(tensor: Tensor) -> int:
    # A subclass may have no memory of its own (DTensor); its version still tells.
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


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
