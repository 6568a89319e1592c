"""Chooses what a user leaves out: devices, and where a module is cut into stages."""
from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from splitpipe.balance.balances import balance_by_time
from splitpipe.checks import accelerators, is_layered, resolve_devices, verify_python
from splitpipe.core.stream import Device, Place
from splitpipe.partition.blocks import Blocks, called
from splitpipe.partition.blocks import device_map as map_of
from splitpipe.partition.by_bytes import cuts_of_map, divide, memory_of, parts_of, share
from splitpipe.partition.dispatched import device_map_of, verify_resident
from splitpipe.partition.repeated import no_blocks, repeated
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule, listed
from splitpipe.schedule.plurals import counted

_log = logging.getLogger("splitpipe")


def chosen_cuts(
    module: Any, cuts: Iterable[str] | None, devices: Iterable[Device] | None, schedule: str | Schedule, sample: Any
) -> tuple[Iterable[str], Iterable[Device] | None]:
    """The cuts and devices of a module, as given, or chosen where they are None."""
    if not isinstance(module, nn.Module) or cuts is not None and devices is not None:
        return () if cuts is None else cuts, devices  # Faults are reported where all arguments are checked.
    verify_python(module)
    verify_resident(module)
    names, homes = cuts_of_map(module, device_map_of(module)) if devices is None else ([], [])
    if cuts is not None:
        wanted = None if isinstance(cuts, str) else listed(cuts)
        if wanted is None:
            return cuts, None
        return wanted, homes if len(homes) == len(wanted) + 1 else None
    rows = _rows(devices, homes, schedule)
    if homes and len(_stages(rows, schedule)) == len(homes) and sample is None:
        found, named = names, _named(rows)
    else:
        found, named = _chosen(module, rows, [*repeated(module)], schedule, sample)
    _log.info("chosen: cuts=%s, devices=%s", found, [str(device) for device in named])
    return found, named


def chosen_balance(
    module: nn.Sequential, devices: Iterable[Device] | None, schedule: str | Schedule, sample: Any
) -> tuple[list[int], Iterable[Device]]:
    """The balance and devices of an nn.Sequential, as given, or chosen where they are None."""
    layers = [*module._modules]
    cuts, named = _chosen(module, _rows(devices, [], schedule), layers, schedule, sample)
    starts = [0, *map(layers.index, cuts), len(layers)]
    found = [end - start for start, end in zip(starts, starts[1:])]
    _log.info("chosen: balance=%s, devices=%s", found, [str(device) for device in named])
    return found, named


def _chosen(
    module: nn.Module, rows: list[Place], where: Sequence[str], schedule: str | Schedule, sample: Any
) -> tuple[list[str], list[Device]]:
    """The names of the modules that start stages 1, 2, ..., and the devices: by time, or without a sample by bytes."""
    places = _stages(rows, schedule)
    if sample is None:
        found, places = _by_bytes(module, places, where, schedule)
        return found, _named(rows if schedule != "gpipe" else places)
    if is_layered(module):
        # The arguments of a call: an nn.Sequential takes one.
        given = sample[0] if type(sample) is tuple and len(sample) == 1 else sample
        balance = balance_by_time(len(places), module, given, device=rows[0].device)
        return [[*module._modules][start] for start in accumulate(balance[:-1])], _named(rows)
    return balance_by_time(len(places), module, sample, device=rows[0].device), _named(rows)


def device_map(module: nn.Module, devices: Iterable[Device] | None = None) -> dict[str, torch.device]:
    """Chooses the device of each block of a module, for loading it without ever holding all of it in one place.

    The module may be on ``meta``, where it takes no memory. Stages get shares by bytes and free memory, as ``attach``
    chooses them if ``cuts`` is left out. A model that is loaded with this map is cut by ``attach`` where the map
    changes.

    Args:
        module: the model; it may be cut at its repeated blocks, such as the layers of a transformer.
        devices: one per stage. Default: all accelerators.

    Returns:
        The device of each block and tensor by name, for ``from_pretrained(device_map=...)``.

    Raises:
        TypeError: ``module`` isn't an nn.Module, or a device has a wrong type.
        ValueError: no blocks of the module repeat, a device isn't available, or the devices can't hold the module.

    Example:
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, device="meta") for _ in range(4))
        >>> model = torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(8, 2, device="meta")})
        >>> device_map(model, ["cpu", "cpu"])["layers.3"]
        device(type='cpu')
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module.")
    places = _rows(devices, [], "gpipe")
    names, places = _by_bytes(module, places, [*repeated(module)], "gpipe")
    blocks = Blocks(module, names)
    return _with_ties(map_of(blocks, {}, [place.device for place in places], placed=False), blocks)


def _with_ties(found: dict[str, torch.device], blocks: Blocks) -> dict[str, torch.device]:
    """The map, with blocks whose tensors are all an earlier block's where these are: accelerate runs them there."""
    for block, name in blocks.blocks.items():
        tensors = [f"{name}.{own}" for own in block.state_dict(keep_vars=True)]
        away = {found[own] for own in tensors if own in found}
        if len(away) == 1 and all(own in found for own in tensors):
            found = {key: device for key, device in found.items() if key not in tensors} | {name: away.pop()}
    return found


def _rows(devices: Iterable[Device] | None, homes: Sequence[torch.device], schedule: str | Schedule) -> list[Place]:
    """The devices, one per row of the schedule."""
    if devices is not None:
        return resolve_devices(devices)
    count = schedule.devices if isinstance(schedule, Schedule) else None
    found = [Place(device) for device in homes] or accelerators()
    if not found:
        count = count or 2
        warnings.warn(
            f"no accelerator is available: using {counted(count, 'stage')} on the CPU. If that is intended, pass "
            "devices=['cpu', 'cpu'] to silence this warning.", stacklevel=4,
        )
        return [Place(torch.device("cpu"))] * count
    return found if count is None else found[:count]


def _stages(rows: list[Place], schedule: str | Schedule) -> list[Place]:
    """The place of each stage."""
    if isinstance(schedule, str):
        if schedule == "gpipe":
            return rows
        schedule = build(schedule, len(rows), len(rows))
    if not isinstance(schedule, Schedule):
        return rows  # The error is raised where all arguments are checked.
    return [rows[row] for row in schedule.placement] if len(rows) >= schedule.devices else rows


def _named(rows: Sequence[Place]) -> list[Device]:
    return [place.device if place.stream is None else place.stream for place in rows]


def _by_bytes(
    module: nn.Module, places: list[Place], where: Sequence[str], schedule: str | Schedule
) -> tuple[list[str], list[Place]]:
    """The names of the modules that start stages 1, 2, ..., and the places of all stages."""
    if len(places) == 1:
        where = []
    elif not where:
        raise no_blocks(module)
    parts = parts_of(module, [name for name in where if called(module.get_submodule(name))])
    if len(parts) < len(places):
        if schedule != "gpipe":
            raise ValueError(
                f"module, a {type(module).__name__}, can be cut into {counted(len(parts), 'block')}, and the schedule "
                f"has {counted(len(places), 'stage')}: expected at least as many blocks. Name fewer devices, or "
                "another schedule."
            )
        places = places[: len(parts)]
    devices = [place.device for place in places]
    found = {device: memory_of(device, module) for device in dict.fromkeys(devices)}
    memory = {device: size for device, size in found.items() if size is not None}
    known = len(memory) == len(found)
    rooms = [memory[device] / devices.count(device) if known else 1.0 for device in devices]
    numbers = divide([part.trained for part in parts], rooms)
    if known:
        _verify_room(share(parts, numbers), rooms, devices)
    starts = [0, *accumulate(numbers)][1:-1]
    return [parts[start].name for start in starts], places


def _verify_room(stages: Sequence[tuple[int, int]], rooms: Sequence[float], devices: Sequence[Any]) -> None:
    weights = sum([own for own, _ in stages])
    there = ", ".join(f"{device} {room / 2**30:.1f}" for device, room in zip(devices, rooms))
    if any([own > room for (own, _), room in zip(stages, rooms)]):
        raise ValueError(
            f"the module's weights take {weights / 2**30:.1f} GiB, and its stages don't have enough free memory (GiB: "
            f"{there}): expected devices that can hold it. Name another device, or load it in fewer bits (4-bit, with "
            "LoRA to train it)."
        )
    trained = sum([own for _, own in stages])
    if any([own > room for (_, own), room in zip(stages, rooms)]):
        _log.warning(
            "weights, gradients and Adam's averages take %.1f GiB, and the stages have (GiB): %s. To train, freeze "
            "weights (LoRA), use an optimizer that keeps less, or name another device; checkpoint='always' saves "
            "activations.", trained / 2**30, there,
        )
