"""The inventory of a stage's modules: parameters, buffers, train or eval modes, compared as lists.

A call uses it for each microbatch, so work that can be done for all modules at once isn't done module by module.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.compiled.layers import is_compiled
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import _BatchNorm, _NormBase

#: A module's parameters, buffers or children, by name.
Table = dict[str, Any]
#: The index of one of the modules' tables, and a name in it.
Slot = tuple[int, str]
#: These count their batches in ``num_batches_tracked`` whenever they write to running statistics.
_WRITING = (_BatchNorm.forward, nn.SyncBatchNorm.forward, DeferredBatchNorm.forward)


class Slots(NamedTuple):
    """The entries of modules' tables, one module after another."""

    tables: list[Table]
    names: list[str]
    values: list[Any]
    sizes: list[int]

    def same(self, other: Slots) -> bool:
        """True if the same objects are in the slots."""
        return self is other or len(self.values) == len(other.values) and all(map(is_, self.values, other.values))

    def put(self) -> None:
        """Restores all slots to these contents."""
        for table, then in zip(self.tables, self._each()):
            if table.keys() != then.keys() or any(table[name] is not then[name] for name in then):
                table.clear()
                table.update(then)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules in the slots."""
        return [value for value in self.values if isinstance(value, nn.Module)]

    def _each(self) -> Iterator[Table]:
        at = 0
        for size in self.sizes:
            yield dict(zip(self.names[at : at + size], self.values[at : at + size]))
            at += size


class Buffers(NamedTuple):
    """Buffers that a forward may write to, and that a recomputation may read."""

    slots: list[Slot]
    tensors: list[Tensor]
    # A BatchNorm's num_batches_tracked: its version changes when the kernel writes to the buffer, whose own doesn't.
    counters: list[Tensor | None]
    norms: list[bool]  # True for a norm's buffer: the kernel writes to it without changing its version.
    complete: bool  # True if there are no others, such as buffers yet to be made, or of inference mode.

    @property
    def quiet(self) -> list[bool]:
        """For each, True if its version doesn't show writes to it."""
        return [norm and counter is None for norm, counter in zip(self.norms, self.counters)]

    def versions(self) -> list[int]:
        """The versions, each plus its counter's."""
        return [x._version + (0 if n is None else n._version) for x, n in zip(self.tensors, self.counters)]


class Inventory:
    """The modules of a stage, collected once for each setting of their train and eval modes."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = layers
        self.named: dict[nn.Module, str] = {}  # Each module with the name of its layer.
        for name, layer in layers:
            for module in layer.modules():
                self.named.setdefault(module, name)
        self._modules = list(self.named)
        self.modes = self.training()
        #: True if a module is compiled, by torch.compile(module) or module.compile().
        self.compiled = any(map(is_compiled, self._modules))
        self.tables: list[Table] = [
            table for module in self._modules for table in (module._parameters, module._buffers, module._modules)
        ]
        self._views = [table.values() for table in self.tables]
        self._slots = Slots(self.tables, [], [object()], [])
        self._buffers: tuple[Slots, Buffers] | None = None

    def slots(self) -> Slots:
        """All parameters, buffers and modules, as they are now."""
        values, last = list(chain.from_iterable(self._views)), self._slots
        # Usually, nothing has moved, and names aren't compared: a forward that only renames its entries isn't noticed.
        if len(values) != len(last.values) or not all(map(is_, values, last.values)):
            names, sizes = list(chain.from_iterable(self.tables)), list(map(len, self.tables))
            self._slots = last = Slots(self.tables, names, values, sizes)
        return last

    def buffers(self, slots: Slots) -> Buffers:
        """The buffers in the slots, which must be the current ones."""
        known = self._buffers
        if known is None or not known[1].complete or not slots.same(known[0]):
            known = self._buffers = slots, self._listed()
        return known[1]

    def _listed(self) -> Buffers:
        found = Buffers([], [], [], [], True)
        for k, module in enumerate(self._modules):
            counter = None if self.compiled or not _plain(module) else module._buffers.get("num_batches_tracked")
            for name, buffer in module._buffers.items():
                if buffer is None:  # A buffer that replaces it shows in the slots.
                    continue
                if is_lazy(buffer) or version_of(buffer) is None:
                    found = found._replace(complete=False)
                    continue
                found.slots.append((3 * k + 1, name))
                found.tensors.append(buffer)
                found.counters.append(counter)
                found.norms.append(isinstance(module, _NormBase))
        return found

    def generators(self) -> list[torch.Generator]:
        """The generators that are attributes of modules."""
        # By type: isinstance(value, torch.Generator) takes microseconds.
        owners = [module for module in self._modules if torch.Generator in map(type, vars(module).values())]
        return [value for module in owners for value in vars(module).values() if isinstance(value, torch.Generator)]

    def renewed(self) -> Inventory:
        """The inventory of the current modules."""
        return Inventory(self._layers)

    def training(self) -> tuple[bool, ...]:
        """The modules' current train or eval modes."""
        return tuple([module.training for module in self._modules])

    def train(self, modes: Iterable[bool]) -> None:
        """Sets the modules' modes."""
        for module, mode in zip(self._modules, modes):
            module.training = mode


def _plain(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and type(module).forward in _WRITING and "forward" not in vars(module)


class Parameters:
    """The parameters of a stage, as a call found them."""

    def __init__(self, inventory: Inventory) -> None:
        found = [
            (layer, name, x)
            for module, layer in inventory.named.items()
            for name, x in module._parameters.items()
            if x is not None
        ]
        self.tensors = [x for *_, x in found]
        self._flags = self.flags()
        #: A lazy module's first forward makes them.
        self._there = [each for each in found if not is_lazy(each[2])]
        # A subclass (DTensor) may have no memory itself; its version still shows writes.
        self._plain = [x for *_, x in self._there if type(x) in (Tensor, nn.Parameter)]
        self._versions, self._addresses = self._now()

    def _now(self) -> tuple[list[int], list[int]]:
        # Another address with the same version means that tensor.data was set.
        return [x._version for *_, x in self._there], list(map(Tensor.data_ptr, self._plain))

    def verify(self) -> None:
        """Raises a RuntimeError if one has been written to since."""
        versions, addresses = self._now()
        if versions == self._versions and addresses == self._addresses:
            return
        moved = {id(x) for x, then, now in zip(self._plain, self._addresses, addresses) if then != now}
        for (layer, name, x), then, now in zip(self._there, self._versions, versions):
            if then != now or id(x) in moved:
                raise RuntimeError(
                    f"parameter {name!r} of layer {layer!r} was modified in place between the forward and its "
                    f"recomputation (version {then} then, {now} now): expected the values that the forward saw. Call "
                    "backward before optimizer.step(); for a layer that writes to its parameters in its own forward, "
                    "such as nn.Embedding(max_norm=...), use checkpoint='never'."
                )

    def flags(self) -> list[bool]:
        """The current requires_grad flags."""
        return [x.requires_grad for x in self.tensors]

    @property
    def required(self) -> bool:
        """True if the requires_grad flags are as the call found them."""
        return self._flags == self.flags()

    def require(self, flags: Sequence[bool] | None = None) -> None:
        """Restores the requires_grad flags, or sets them."""
        for x, flag in zip(self.tensors, self._flags if flags is None else flags):
            if x.requires_grad != flag:
                x.requires_grad_(flag)
