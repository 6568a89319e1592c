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

    def parameters(self) -> list[Found]:
        """The parameters as they are now."""
        return [
            Found(layer, module._parameters, name, tensor, _version(tensor))
            for layer, module in self._modules
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]

    def buffers(self) -> list[Found]:
        """The buffers as they are now."""
        return [
            Found(layer, module._buffers, name, tensor, _version(tensor))
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
    """Parameters and buffers at the start of one microbatch."""

    def __init__(self, inventory: Inventory, parameters: Sequence[Found], clones: Clones) -> None:
        self._parameters = parameters
        self._clones = clones
        self._buffers = [(found, clones.take(found)) for found in inventory.buffers() if found.version is not None]

    def compare(self) -> None:
        """To be called after a stage's first run."""
        self._clones.compare(self._buffers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Parameters and buffers are as they were inside the block, and as they are now after it.

        Raises:
            RuntimeError: a parameter was written to since; what forward computed with is gone.
        """
        for found in self._parameters:
            if found.version is not None and found.tensor._version != found.version:
                raise RuntimeError(
                    f"parameter {found.name!r} of layer {found.layer!r} was modified in place between the forward and "
                    f"its recomputation (version {found.version} then, {found.tensor._version} now): expected the "
                    "values that the forward saw. Call backward before optimizer.step(), or use checkpoint='never'."
                )
        everything = [*self._parameters, *(found for found, _ in self._buffers)]
        slots = [(found, found.owner.get(found.name)) for found in everything]
        written = [
            (found.tensor, clone, found.tensor.detach().clone())
            for found, clone in self._buffers
            if self._clones.silent(found) or found.tensor._version != found.version
        ]
        try:
            for found in everything:
                _put(found.owner, found.name, found.tensor)
            # Through .data: a buffer that autograd saved elsewhere keeps its version, as it keeps its values.
            for tensor, then, _ in written:
                tensor.data.copy_(then)
            yield
        finally:
            for tensor, _, now in written:
                tensor.data.copy_(now)
            for found, tensor_now in slots:
                _put(found.owner, found.name, tensor_now)


def _version(tensor: Tensor) -> int | None:
    return None if is_lazy(tensor) else tensor._version


def _put(owner: Any, name: str, tensor: Tensor | None) -> None:
    if owner.get(name) is not tensor:
        owner[name] = tensor
