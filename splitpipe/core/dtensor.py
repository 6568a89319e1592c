"""Tensor parallelism inside a stage: layers whose parameters are DTensors communicate with other processes.

Processes match collectives by the order of the calls, not by their purpose. So every process must call them in the same
order; with a thread per stage, the order would vary.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from splitpipe.core.graph import Identity


def sharded(layers: Iterable[nn.Module]) -> bool:
    """True if any parameter or buffer is a DTensor, that is, sharded over processes."""
    return any(True for _ in _shards(layers))


def groups(layers: Iterable[nn.Module]) -> dict[str, str]:
    """The process groups whose collectives the layers' DTensors use, each with the name of such a tensor."""
    found: dict[str, str] = {}
    for name, x in _shards(layers):
        if x.device_mesh.get_coordinate() is not None:  # A process outside a mesh has none of its groups.
            for group in x.device_mesh.get_all_groups():
                found.setdefault(group.group_name, name)
    return found


def _dtensor() -> Any:
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # Unless imported, without instances.


def meshed(*tensors: Tensor | None) -> bool:
    """True if all tensors are DTensors."""
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
    """The names of submodules (or the module itself) that FSDP wraps: their parameters are whole only during calls."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # If it isn't imported, it wraps nothing.
    kinds = tuple(filter(None, (getattr(fsdp, kind, None) for kind in ("FSDPModule", "FullyShardedDataParallel"))))
    return [name for name, part in module.named_modules() if isinstance(part, kinds)] if kinds else []


class Arrived(Identity):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return Identity.forward(ctx, x.trigger_wait())


def arrived(leaf: Any) -> Any:
    """Waits for a pending tensor (an AsyncCollectiveTensor), and returns the plain one; other values as they are."""
    # A recomputation starts from the plain tensor; with another class, it wouldn't save what the forward has saved.
    return Arrived.apply(leaf) if under_way(leaf) else leaf


def under_way(leaf: Any) -> bool:
    """True for a tensor that a collective has yet to fill (an AsyncCollectiveTensor)."""
    return isinstance(leaf, Tensor) and type(leaf) is not Tensor and hasattr(leaf, "trigger_wait")


def waited(x: Any) -> Any:
    """The tensor itself, if it is pending."""
    return x.trigger_wait() if type(x) is not Tensor and under_way(x) else x


def wait(leaf: Any) -> None:
    """Waits for a tensor that won't be read: torch keeps each pending tensor until it is read."""
    x: Any = getattr(leaf, "_local_tensor", leaf) if isinstance(leaf, Tensor) else leaf  # A DTensor contains it.
    if under_way(x):
        x.trigger_wait()
