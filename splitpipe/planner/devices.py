"""The devices that a profile is of: which of them are alike, and how many bytes each has for a plan."""
from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from splitpipe.balance.layers import memory_of, state_of
from splitpipe.core.stream import Place

#: Of an accelerator's free memory: the rest is for workspaces, and for what fragmentation loses.
USABLE = 0.9


def kinds_of(places: Sequence[Place]) -> dict[str, list[int]]:
    """The rows of each kind of device."""
    found: dict[tuple[object, ...], list[int]] = {}
    names: dict[tuple[object, ...], str] = {}
    for row, place in enumerate(places):
        key: tuple[object, ...] = ("cpu",)
        name = "cpu"
        if place.device.type != "cpu":
            # Some kinds of accelerators have no names.
            ask: Any = getattr(torch.get_device_module(place.device), "get_device_name", None)
            name = place.device.type if ask is None else ask(place.device)
            key = (name, capacity(place.device)[1])
            if place.stream is not None:  # It may be a part of a device.
                name, key = f"{name}, stream of {place} (row {row})", (place.device, place.stream.stream_id)
        found.setdefault(key, []).append(row)
        names[key] = name if name not in names.values() else names.get(key, f"{name} ({len(names)})")
    return {names[key]: rows for key, rows in found.items()}


def capacity(device: torch.device) -> tuple[float, float]:
    """Bytes that are free on an accelerator, and all that it has; infinite if it does not tell."""
    modules: list[tuple[Any, str]] = [
        (torch.accelerator, "get_memory_info"), (torch.get_device_module(device), "mem_get_info")
    ]
    for module, name in modules:
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            free, total = getattr(module, name)(device)
            return int(free) + _kept(device), int(total)
    return math.inf, math.inf


def _kept(device: torch.device) -> int:
    """Bytes that torch's allocator has taken from the driver, and keeps for tensors to come."""
    modules: list[Any] = [torch.accelerator, torch.get_device_module(device)]
    for module in modules:
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            return max(0, int(module.memory_reserved(device)) - int(module.memory_allocated(device)))
    return 0


def workspace(device: torch.device) -> int:
    """Bytes that torch keeps for matrix products of one thread on one stream, as CublasHandlePool.cpp chooses them."""
    if device.type != "cuda":
        return 0
    lighter = int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", 1024)) * 2**10
    given = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return lighter + sum(int(size) * int(count) for size, count in given) * 2**10
    hopper = torch.version.hip is not None or torch.cuda.get_device_capability(device) == (9, 0)
    return lighter + (32 * 2**20 if hopper else 2 * 2**22 + 8 * 2**14)


def room(module: nn.Sequential, places: Sequence[Place], memory: float | Sequence[float] | None) -> list[float]:
    """Bytes that each row may use."""
    if isinstance(memory, (int, float)):
        return [memory] * len(places)
    if memory is not None:
        return list(memory)
    devices = [place.device for place in places]
    own: dict[torch.device, dict[Any, int]] = {}
    for _, tensor in state_of(module):
        if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):  # Of a lazy layer: no memory yet.
            continue
        own.setdefault(tensor.device, {}).update(memory_of(tensor))
    free = {
        device: math.inf if device.type == "cpu"
        else (capacity(device)[0] + sum(own.get(device, {}).values())) * USABLE / devices.count(device)
        for device in set(devices)
    }
    return [free[device] for device in devices]
