"""Cuts of a module without measuring it: where its device map changes, or by bytes and free memory.

    embed | 0 | 1 | 2 | 3 | 4 | 5 | norm, head     parts: a cut may be before each repeated block, in the order
          ^       ^               ^                of definition; what is between blocks belongs to the part before
    stage 0       stage 1         stage 2          minimises how full the fullest stage's memory is
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from splitpipe.partition.blocks import Blocks, called


@dataclass
class Section:
    """Everything from one possible cut to the next."""

    name: str  #: Of the module that it starts with; "" for the first part.
    weights: int = 0  #: Bytes of its parameters and buffers.
    trained: int = 0  #: Bytes including everything that training with Adam keeps.


def parts_of(module: nn.Module, where: Sequence[str]) -> list[Section]:
    """The parts of a module that may be cut at calls of these submodules; a tensor counts once."""
    blocks = Blocks(module, where)
    seen, parts, begun = set[int](), [Section("")], False
    for name, part in module.named_modules():
        if part in blocks.cuts and begun:  # Before the first cut there must be something for its stage.
            parts.append(Section(name))
        begun = begun or part in blocks.blocks
        for x in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if id(x) not in seen and x.layout is torch.strided:  # A sparse one has few entries.
                seen.add(id(x))
                parts[-1].weights += x.nbytes
                parts[-1].trained += x.nbytes * (4 if x.requires_grad else 1)  # Itself, gradient, two averages.
    return parts


def divide(sizes: Sequence[float], rooms: Sequence[float]) -> list[int]:
    """The number of parts of each stage, which minimise how full the fullest stage is relative to its room.

    Among equally good ones, how full the second one is, and so on. There are at least as many parts as rooms.
    """
    ends = [0.0, *accumulate(sizes)]
    # By the end of the latest stage: how full the best stages up to there are, fullest first, and their parts.
    best: dict[int, tuple[list[float], list[int]]] = {0: ([], [])}
    for stage, room in enumerate(rooms):
        best = {
            end: min([
                (sorted([*fills, (ends[end] - ends[start]) / room], reverse=True), [*numbers, end - start])
                for start, (fills, numbers) in best.items() if start < end
            ])
            for end in range(stage + 1, len(sizes) - (len(rooms) - stage - 1) + 1)
        }
    return best[len(sizes)][1]


def memory_of(device: torch.device, module: nn.Module) -> float | None:
    """The bytes of a device that a module may use: the free ones, and its own there. None: unknown, as on the CPU."""
    kind: Any = torch.get_device_module(device)
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        # The allocator keeps what it has taken from the driver, for later tensors.
        cached: int = kind.memory_reserved(device) - kind.memory_allocated(device)
        tensors = {id(x): x for x in (*module.parameters(), *module.buffers()) if x.device == device}
        return float(kind.mem_get_info(device)[0]) + max(0, cached) + sum([x.nbytes for x in tensors.values()])
    return None


def cuts_of_map(module: nn.Module) -> tuple[list[str], list[torch.device]]:
    """The cuts and devices of the map that a model was loaded with: a stage starts where a device appears first.

    Both are empty if it was loaded to one device, or without a map.
    """
    found = getattr(module, "hf_device_map", None) or {}
    devices = {name: torch.device(device) for name, device in found.items()}
    if len({*devices.values()}) < 2:
        return [], []
    starts: dict[torch.device, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if name in devices and devices[name] not in starts:
            inside = part.named_modules(prefix=name, remove_duplicate=False)
            first = next((own for own, each in inside if called(each)), None)  # Lists aren't.
            if first is not None:
                starts[devices[name]] = first
    return [*starts.values()][1:], [*starts]
