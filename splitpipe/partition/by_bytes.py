"""Cuts of a module without measuring it: where its device map changes, or by bytes and free memory.

    embed | 0 | 1 | 2 | 3 | 4 | 5 | norm, head     parts: a cut may be before each repeated block, in the order
          ^       ^               ^                of definition; what is between blocks belongs to the part before
    stage 0       stage 1         stage 2          minimises how full the fullest stage's memory is

A part's bytes are those of its parameters and buffers. Trained parameters count four times, because of their gradients
and Adam's two averages.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.partition.blocks import Blocks, called

#: Tensors of a parameter's size that training keeps: itself, its gradient, and two moments.
TRAINED = 4


class Part(NamedTuple):
    """Everything from one possible cut to the next."""

    name: str  #: Of the module that it starts with; "" for the first part.
    weights: int  #: Bytes of its parameters and buffers.
    trained: int  #: Bytes including everything that training keeps.


def parts_of(module: nn.Module, where: Sequence[str]) -> list[Part]:
    """The parts of a module that may be cut at calls of these submodules; a tensor counts once."""
    blocks = Blocks(module, where)
    seen: set[int] = set()
    parts = [Part("", 0, 0)]
    begun = False
    for name, part in module.named_modules():
        block = part in blocks.blocks
        if not block and part not in blocks.opened:
            continue
        if part in blocks.cuts and begun:  # Before the first cut there must be something for its stage.
            parts.append(Part(name, 0, 0))
        begun = begun or block
        tensors = [x for x in (*part.parameters(recurse=block), *part.buffers(recurse=block)) if id(x) not in seen]
        seen.update(map(id, tensors))
        last = parts[-1]
        parts[-1] = Part(
            last.name, last.weights + sum([x.nbytes for x in tensors]), last.trained + sum(map(_trained, tensors))
        )
    return parts


def _trained(x: Tensor) -> int:
    return x.nbytes * (TRAINED if x.requires_grad else 1)


def divide(sizes: Sequence[float], rooms: Sequence[float]) -> list[int]:
    """The number of parts of each stage, which minimise how full the fullest stage is relative to its room.

    Among equally good ones, the most even. There are at least as many parts as rooms.
    """
    ends, count = [0.0, *accumulate(sizes)], len(sizes)

    def best(cost: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """The least cost of all parts, where ``cost`` adds each stage's, and the number of parts of each stage."""
        least: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # By end: the cost, and where the stage starts.
        for stage, room in enumerate(rooms):
            found: dict[int, tuple[float, int]] = {}
            for end in range(stage + 1, count - (len(rooms) - stage - 1) + 1):
                found[end] = min([
                    (cost(before, (ends[end] - ends[start]) / room), start)
                    for start, (before, _) in least[-1].items() if start < end
                ])
            least.append(found)
        numbers, end = list[int](), count
        for found in reversed(least[1:]):
            start = found[end][1]
            numbers, end = [end - start, *numbers], start
        return least[-1][count][0], numbers

    most, _ = best(max)
    return best(lambda before, own: before + (own * own if own <= most else math.inf))[1]


def memory_of(device: torch.device, module: nn.Module) -> float | None:
    """The bytes of a device that a module may use: the free ones, and those that it already uses there."""
    free = None if device.type == "cpu" else asked(device, "get_memory_info", "mem_get_info")
    if free is None:
        return None
    # The allocator keeps what it has taken from the driver, for later tensors.
    cached = (asked(device, "memory_reserved") or 0) - (asked(device, "memory_allocated") or 0)
    tensors = {id(x): x for x in (*module.parameters(), *module.buffers()) if x.device == device}
    return float(free[0]) + max(0, cached) + sum([x.nbytes for x in tensors.values()])


def asked(device: torch.device, *names: str) -> Any:
    """The result of a function of torch.accelerator or of the device's own module; None if neither has it."""
    for module in torch.accelerator, torch.get_device_module(device):
        for name in names:
            with suppress(AttributeError, NotImplementedError, RuntimeError):
                return getattr(module, name)(device)
    return None


def cuts_of_map(module: nn.Module, devices: Mapping[str, torch.device]) -> tuple[list[str], list[torch.device]]:
    """The cuts and devices of a map: a stage starts where a device appears for the first time."""
    order = {name: place for place, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    cuts: list[str] = []
    found: list[torch.device] = []
    for name in sorted([name for name in devices if name in order], key=order.__getitem__):
        if devices[name] in found:
            continue
        first = _first_called(module.get_submodule(name), name)
        if first is None:
            continue
        if found:
            cuts.append(first)
        found.append(devices[name])
    return cuts, found


def _first_called(part: nn.Module, name: str) -> str | None:
    """The name of a module, or, if it is a list, of the first module in it that is called."""
    if called(part):
        return name
    return next((found for own, child in part._modules.items() if child is not None
                 for found in [_first_called(child, f"{name}.{own}")] if found is not None), None)


def share(parts: Sequence[Part], numbers: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage, the bytes of its weights, and those that training keeps."""
    starts = [0, *accumulate(numbers)]
    stages = [parts[start:end] for start, end in zip(starts, starts[1:])]
    return [(sum([part.weights for part in own]), sum([part.trained for part in own])) for own in stages]
