"""A stage's parameters and buffers as one microbatch found them, put back while it is recomputed.

Forward may write to buffers (BatchNorm counts, spectral norm iterates), and ``torch.func.functional_call`` swaps
parameters for the time of the forward alone. A recomputation that took what is there in backward would count twice,
or differentiate another function.

A clone of a buffer serves every microbatch that finds the buffer at the same version. Some kernels (BatchNorm's)
write without moving the version; a stage's first run compares values, and such buffers are cloned each time.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Owner = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Found:
    """A tensor in its module's slot, at its version."""

    layer: str
    owner: Owner
    name: str
    tensor: Tensor
    version: int | None  # None: not there yet, a lazy module's first forward makes it.
    storage: int  # Another one, at the same version: somebody set ``tensor.data``.
    requires_grad: bool

    @property
    def slot(self) -> tuple[int, str]:
        """Where it was found, to tell slots apart."""
        return id(self.owner), self.name


class Inventory:
    """The modules of a stage, looked through once a pass.

    Args:
        layers: name and module of each layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = list(_modules(layers))
        self.modes = tuple([module.training for _, module in self._modules])
        #: Whether a module is compiled: by torch.compile(module) or module.compile().
        self.compiled = any(
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            for _, module in self._modules
        )

    def parameters(self) -> list[Found]:
        """The parameters as they are now."""
        return [
            _found(layer, module._parameters, name, tensor)
            for layer, module in self._modules
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]

    def modules(self) -> list[nn.Module]:
        """Each module once."""
        return [module for _, module in self._modules]

    def buffers(self) -> list[Found]:
        """The buffers as they are now."""
        return [
            _found(layer, module._buffers, name, tensor)
            for layer, module in self._modules
            for name, tensor in module._buffers.items()
            if tensor is not None and (is_lazy(tensor) or not tensor.is_inference())
        ]


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


@dataclass
class Clones:
    """Clones of a stage's buffers, kept from pass to pass."""

    _clones: dict[tuple[int, str], tuple[Found, Tensor]] = field(default_factory=dict)
    _silent: set[tuple[int, str]] = field(default_factory=set)

    def take(self, found: Found) -> Tensor:
        """A clone of the buffer as it was found."""
        kept = self._clones.get(found.slot)
        if kept is not None and found.slot not in self._silent:
            before, clone = kept
            if before.tensor is found.tensor and before.version == found.version:
                return clone
        clone = found.tensor.detach().clone()
        self._clones[found.slot] = found, clone
        return clone

    def silent(self, found: Found) -> bool:
        """Whether the buffer is known to change without its version telling."""
        return found.slot in self._silent

    def compare(self, before: Sequence[tuple[Found, Tensor]]) -> None:
        """Learns which buffers have changed without their version telling."""
        for found, clone in before:
            if found.tensor._version == found.version and not torch.equal(found.tensor, clone):
                self._silent.add(found.slot)


class Snapshot:
    """Parameters, buffers and train or eval modes at the start of one microbatch."""

    def __init__(self, inventory: Inventory, parameters: Sequence[Found], clones: Clones) -> None:
        self._inventory = inventory
        self._parameters = parameters
        self._clones = clones
        self._buffers = [(found, clones.take(found)) for found in inventory.buffers() if found.version is not None]
        self._registered = [dict(module._buffers) for module in inventory.modules()]

    def compare(self) -> None:
        """To be called after a stage's first run."""
        self._clones.compare(self._buffers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All is as it was inside the block, and as it is now after it.

        Raises:
            RuntimeError: a parameter was written to since; what forward computed with is gone.
        """
        for found in self._parameters:
            _verify(found)
        modules = self._inventory.modules()
        now = [(module.training, dict(module._parameters), dict(module._buffers)) for module in modules]
        flags = [(found.tensor, found.tensor.requires_grad) for found in self._parameters]
        written = [
            (found.tensor, clone, found.tensor.detach().clone())
            for found, clone in self._buffers
            if self._clones.silent(found) or found.tensor._version != found.version
        ]
        try:
            for module, training, buffers in zip(modules, self._inventory.modes, self._registered):
                module.training = training
                _fill(module._buffers, buffers)
            for found in self._parameters:
                _put(found.owner, found.name, found.tensor)
                _require(found.tensor, found.requires_grad)
            # Through .data: a buffer that autograd saved elsewhere keeps its version, as it keeps its values.
            for tensor, then, _ in written:
                tensor.data.copy_(then)
            yield
        finally:
            for tensor, _, value in written:
                tensor.data.copy_(value)
            for tensor, flag in flags:
                _require(tensor, flag)
            for module, (training, parameters, buffers) in zip(modules, now):
                module.training = training
                _fill(module._parameters, parameters)
                _fill(module._buffers, buffers)


def _found(layer: str, owner: Owner, name: str, tensor: Tensor) -> Found:
    if is_lazy(tensor):
        return Found(layer, owner, name, tensor, None, 0, tensor.requires_grad)
    return Found(layer, owner, name, tensor, tensor._version, _storage(tensor), tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    # A subclass may have no storage of its own (DTensor); its version still tells.
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, nn.Parameter) else 0


def _verify(found: Found) -> None:
    if found.version is None:
        return
    if found.tensor._version != found.version or _storage(found.tensor) != found.storage:
        raise RuntimeError(
            f"parameter {found.name!r} of layer {found.layer!r} was modified in place between the forward and its "
            f"recomputation (version {found.version} then, {found.tensor._version} now): expected the values that the "
            "forward saw. Call backward before optimizer.step(); for a layer that writes to its parameters in its own "
            "forward, as nn.Embedding(max_norm=...) does, use checkpoint='never'."
        )


def _fill(owner: dict[str, Any], then: dict[str, Any]) -> None:
    if owner.keys() != then.keys() or any(owner[name] is not then[name] for name in then):
        owner.clear()
        owner.update(then)


def _put(owner: Any, name: str, tensor: Tensor | None) -> None:
    if owner.get(name) is not tensor:
        owner[name] = tensor


def _require(tensor: Tensor, grad: bool) -> None:
    if tensor.requires_grad != grad:
        tensor.requires_grad_(grad)
