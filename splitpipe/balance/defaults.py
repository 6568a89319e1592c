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
from splitpipe.checks import accelerators, is_layered, resolve_devices, verify_supported
from splitpipe.core.stream import Device, Place
from splitpipe.partition.blocks import Blocks, called, no_blocks, repeated
from splitpipe.partition.by_bytes import cuts_of_map, divide, memory_of, parts_of
from splitpipe.partition.device_map import device_map as map_of
from splitpipe.partition.placement import by_stage, verify_filled
from splitpipe.piped import Arguments
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule, counted, listed

_log = logging.getLogger("splitpipe")

#: Schedules for any number of stages, one per device.
_ANY_NUMBER = None, "gpipe"


def chosen_cuts(module: Any, cuts: Iterable[str] | None, given: Arguments) -> tuple[Iterable[str], Arguments]:
    """The cuts of a module and all arguments, with cuts and devices chosen where they are None."""
    devices, schedule, sample = given["devices"], given["schedule"], given["sample"]
    if not isinstance(module, nn.Module) or cuts is not None and devices is not None:
        return () if cuts is None else cuts, given  # Faults are reported where all arguments are checked.
    verify_supported(module)
    verify_filled(module)
    names, homes = cuts_of_map(module) if devices is None else ([], [])
    if cuts is not None:
        wanted = None if isinstance(cuts, str) else listed(cuts)
        same = wanted is not None and len(homes) == len(wanted) + 1
        return cuts if wanted is None else wanted, {**given, "devices": homes if same else None}
    rows: list[Any] = _rows(devices, homes, schedule)
    is_placed = homes and len(_stages(rows, schedule)) == len(homes) and sample is None
    found, places = (names, rows) if is_placed else _chosen(module, rows, schedule, sample)
    _log.info("chosen: cuts=%s, devices=%s", found, [str(place.device) for place in places])
    return found, {**given, "devices": places}


def chosen_balance(module: nn.Sequential, given: Arguments) -> tuple[list[int], Arguments]:
    """The balance that is chosen for an nn.Sequential, and all arguments, with devices chosen if they are None."""
    schedule = given["schedule"]
    cuts, places = _chosen(module, _rows(given["devices"], [], schedule), schedule, given["sample"])
    names = [*module._modules]
    ends = [*map(names.index, cuts), len(names)]
    found = [end - start for start, end in zip([0, *ends], ends)]
    _log.info("chosen: balance=%s, devices=%s", found, [str(place.device) for place in places])
    return found, {**given, "devices": places}


def _chosen(
    module: nn.Module, rows: list[Place], schedule: str | Schedule | None, sample: Any
) -> tuple[list[str], list[Any]]:
    """The names of the modules that start stages 1, 2, ..., and the devices: by time, or without a sample by bytes."""
    places, layered = _stages(rows, schedule), is_layered(module)
    where = [*module._modules] if layered else [*repeated(module)]
    if sample is None:
        cuts, places = _by_bytes(module, places, where)
        return cuts, places if schedule in _ANY_NUMBER else rows
    if layered and type(sample) is tuple and len(sample) == 1:  # A call's arguments: an nn.Sequential takes one.
        sample = sample[0]
    device = rows[0].device if rows[0].device.type == "cpu" else None
    found = balance_by_time(len(places), module, sample, device=device)
    return [where[start] for start in accumulate(found[:-1])] if layered else found, rows


def device_map(module: nn.Module, devices: Iterable[Device] | None = None) -> dict[str, torch.device]:
    """Chooses the device of each block of a module, for loading it without ever holding all of it in one place.

    Stages get shares by bytes and free memory, as ``attach`` chooses them if ``cuts`` is left out. A model that is
    loaded with this map is cut by ``attach`` where the map changes.

    Args:
        module: the model, which may be on ``meta``. Stages begin with repeated blocks, as a transformer's layers.
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
    places = _rows(devices, [], None)
    names, places = _by_bytes(module, places, [*repeated(module)])
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


def _rows(
    devices: Iterable[Device] | None, homes: Sequence[torch.device], schedule: str | Schedule | None
) -> list[Place]:
    """The devices, one per row of the schedule."""
    if devices is not None:
        return resolve_devices(devices)
    count = schedule.devices if isinstance(schedule, Schedule) else None
    found = resolve_devices(homes) or accelerators()
    if not found:
        count = count or 2
        what = f"no accelerator is available: using {counted(count, 'stage')} on the CPU. To silence this warning, "
        warnings.warn(f"{what}pass devices=['cpu', 'cpu'].", stacklevel=4)
        found = [Place(torch.device("cpu"))] * count
    elif len(found) == 1:
        warnings.warn("one device: a pipeline of one stage, slower than the module. Expected several.", stacklevel=4)
    return found[:count]


def _stages(rows: list[Place], schedule: str | Schedule | None) -> list[Place]:
    if isinstance(schedule, str) and schedule != "gpipe":
        schedule = build(schedule, len(rows), len(rows))
    if not isinstance(schedule, Schedule) or len(rows) < schedule.devices:
        return rows  # Errors are raised where all arguments are checked.
    return [rows[row] for row in schedule.placement]


def _by_bytes(module: nn.Module, places: list[Place], where: Sequence[str]) -> tuple[list[str], list[Place]]:
    """The names of the modules that start stages 1, 2, ..., and the places of all stages, no more than parts."""
    if len(places) == 1:
        where = []
    elif not where:
        raise no_blocks(module)
    parts = parts_of(module, [name for name in where if called(module.get_submodule(name))])
    places = places[: len(parts)]
    devices = [place.device for place in places]
    memory = {device: memory_of(device, module) for device in dict.fromkeys(devices)}
    known = None not in memory.values()
    rooms = [(memory[device] or 0) / devices.count(device) if known else 1.0 for device in devices]
    numbers = divide([part.trained for part in parts], rooms)
    weights = [sum([part.weights for part in own]) for own in by_stage(parts, numbers)]
    if known and any(own > room for own, room in zip(weights, rooms)):
        there = ", ".join(f"{device} {room / 2**30:.1f}" for device, room in zip(devices, rooms))
        raise ValueError(
            f"the module's weights take {sum(weights) / 2**30:.1f} GiB, and its stages don't have enough free memory "
            f"(GiB: {there}): expected devices that can hold it, or fewer bits (4-bit, with LoRA to train it)."
        )
    starts = [0, *accumulate(numbers)][1:-1]
    return [parts[start].name for start in starts], places
