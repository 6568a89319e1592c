"""Tensor parallelism inside a stage: layers whose parameters are DTensors talk to other processes while they run.

Processes match collectives by the order of the calls, not by what they are for. So every process must call them in the
same order; with a thread for each stage the order would vary.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from splitpipe.core.graph import Identity


def sharded(layers: Iterable[nn.Module]) -> bool:
    """Tells whether any parameter or buffer is a DTensor, that is, sharded over processes."""
    return any(True for _ in _shards(layers))


def groups(layers: Iterable[nn.Module]) -> dict[str, str]:
    """The process groups whose collectives the layers' DTensors call: by group's name, the name of such a tensor."""
    found: dict[str, str] = {}
    for name, x in _shards(layers):
        if x.device_mesh.get_coordinate() is not None:  # A process outside of a mesh has no groups of it.
            for group in x.device_mesh.get_all_groups():
                found.setdefault(group.group_name, name)
    return found


def _dtensor() -> Any:
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # Not imported, it has no instance.


def meshed(*tensors: Tensor | None) -> bool:
    """Tells whether all tensors are DTensors."""
    kind = _dtensor()
    return kind is not None and all([x is None or type(x) is kind for x in tensors])


def _shards(layers: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    kind = _dtensor()
    if kind is None:
        return
    for layer in layers:
        for name, x in chain(layer.named_parameters(), layer.named_buffers()):
            if isinstance(x, kind):
                yield f"{type(layer).__name__}.{name}", x


def gathered(module: nn.Module) -> list[str]:
    """The names of submodules (or the module itself) that FSDP wraps: their parameters are whole during calls only."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # Not imported, it has none.
    kinds = tuple(filter(None, (getattr(fsdp, kind, None) for kind in ("FSDPModule", "FullyShardedDataParallel"))))
    return [name for name, part in module.named_modules() if isinstance(part, kinds)] if kinds else []


class Arrived(Identity):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return Identity.forward(ctx, x.trigger_wait())


def arrived(leaf: Any) -> Any:
    """Waits for a tensor that is under way (an AsyncCollectiveTensor), and gives the plain one; other values as is."""
    # A recomputation starts from the plain tensor; from another class it would not save what the forward has saved.
    return Arrived.apply(leaf) if under_way(leaf) else leaf


def under_way(leaf: Any) -> bool:
    """True for a tensor that a collective is still to fill (an AsyncCollectiveTensor)."""
    return isinstance(leaf, Tensor) and type(leaf) is not Tensor and hasattr(leaf, "trigger_wait")


def waited(x: Any) -> Any:
    """The tensor itself where one is under way."""
    return x.trigger_wait() if type(x) is not Tensor and under_way(x) else x


def wait(leaf: Any) -> None:
    """Waits for a tensor that nobody will read: torch keeps each that is under way until somebody does."""
    x: Any = getattr(leaf, "_local_tensor", leaf) if isinstance(leaf, Tensor) else leaf  # A DTensor has it inside.
    if under_way(x):
        x.trigger_wait()
