"""Chooses stages: by the time or the memory of a module's parts; and devices and cuts that a user leaves out."""
from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from splitpipe import checks
from splitpipe.balance.rig import Layer, measure
from splitpipe.balance.survey import survey
from splitpipe.core.stream import Device, Place
from splitpipe.partition.blocks import Blocks, called, no_blocks, repeated, verify_cuts
from splitpipe.partition.by_bytes import cuts_of_map, divide, memory_of, parts_of
from splitpipe.partition.device_map import device_map as map_of
from splitpipe.partition.placement import by_stage
from splitpipe.piped import Arguments, verify_unsplit
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule, counted

_log = logging.getLogger("splitpipe")

#: Schedules for any number of stages, one per device.
_ANY_NUMBER = None, "gpipe"


def balance_by_time(
    partitions: int, module: nn.Module, sample: object, *, timeout: float = 1.0, device: Device | None = None
) -> list[Any]:
    """Chooses stages so that the slowest one takes as little time as possible.

    A copy of the module is trained, in train mode and with the split backward, as a pipeline on one device: with each
    layer of an nn.Sequential as a stage, or with a cut at each call of a repeated block (children of one module, of one
    class, such as the layers of a transformer). The model, its gradients and buffers, the sample and the random state
    stay as they are. The user's hooks don't run. Autocast applies if it is on around the call.

    Args:
        partitions: number of stages.
        module: the model. If it isn't an nn.Sequential, backward starts at the field ``loss`` of its output, or else at
            all tensors in it.
        sample: an input of an nn.Sequential, such as a tensor of shape (rows, ...). For any other module, a call's
            arguments: keywords in a dict, positional ones in a tuple, or one tensor. Ideally as large as a microbatch.
        timeout: seconds for repeating runs, not counting the copy and the first runs, which are a warm-up.
        device: where to run the copy. Default: the current accelerator, all if it is too small, or the CPU without any.

    Returns:
        For an nn.Sequential, the number of layers of each stage, for ``balance``. For any other module, the names of
        the blocks with whose calls stages 1, 2, ... start, for ``cuts``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value, or there are fewer layers or repeated blocks than stages.

    Example:
        >>> from splitpipe.balance import balance_by_time
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance = balance_by_time(2, module, torch.randn(16, 8), timeout=0.1)
        >>> len(balance), sum(balance)
        (2, 3)
    """
    if not checks.number_of("timeout", timeout, "seconds"):
        raise ValueError(f"timeout is {timeout}: expected seconds, more than 0.")
    return _measured(partitions, module, sample, "sample", device, lambda layer: layer.time, seconds=timeout)


def balance_by_size(
    partitions: int, module: nn.Module, input: object, *, chunks: int = 1, param_scale: float = 2.0,
    device: Device | None = None,
) -> list[Any]:
    """Chooses stages so that the fullest one takes as little memory as possible.

    It runs a copy, returns and raises as ``balance_by_time`` does. A stage holds the tensors that autograd saves for
    backward (a storage counts for the first layer or block that saves it; the model's input isn't counted) and
    ``param_scale`` times the parameters. Frozen parameters and buffers count at most once, shared state for the first
    layer or block that has it.

    Args:
        partitions: as for ``balance_by_time``, and so are ``module`` and ``device``.
        input: a training batch, in the form of ``balance_by_time``'s sample.
        chunks: number of microbatches that the batch is split into. Only the first of them is run.
        param_scale: number of tensors of a parameter's size that training holds, including the parameter: 2 with its
            gradient, 3 with SGD's momentum, 4 with Adam's two moments, 5 with the third one of amsgrad.

    Example:
        >>> from splitpipe.balance import balance_by_size
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance_by_size(2, module, torch.randn(16, 8), param_scale=4.0)
        [1, 2]
    """
    scale = checks.number_of("param_scale", param_scale, "tensors per parameter")

    def size(layer: Layer) -> float:
        return layer.saved - layer.repeated + scale * layer.parameters + min(scale, 1.0) * layer.state

    return _measured(partitions, module, input, "input", device, size, chunks=chunks)


def _measured(
    partitions: int, module: nn.Module, sample: object, whose: str, device: Device | None,
    cost: Callable[[Layer], float], *, chunks: int = 1, seconds: float = 0.0,
) -> list[Any]:
    """The number of layers of each stage, or the names of the blocks with which stages 1, 2, ... start."""
    for name, value in ("partitions", partitions), ("chunks", chunks):
        if not checks.is_integer(value):
            raise TypeError(f"{name} is {value!r}: expected an int. Check the order of the arguments.")
        if value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more.")
    places = [Place(checks.resolve_device(device))]
    if device is None:
        places += [place for place in checks.accelerators() if place not in places]
    subject = survey(module, sample, whose)
    most, what = len(subject.names), "a layer" if subject.layered else "a block"
    if partitions > most:
        raise ValueError(f"partitions is {partitions}: expected 1 to {most}, as each stage needs at least {what}.")
    layers = measure(subject, places, chunks=operator.index(chunks), seconds=seconds)
    lengths = divide([cost(layer) for layer in layers], [1.0] * operator.index(partitions))
    return lengths if subject.layered else [subject.names[start] for start in accumulate(lengths[:-1])]


def chosen_cuts(module: nn.Module, cuts: Iterable[str] | None, given: Arguments) -> tuple[list[str], Arguments]:
    """The cuts of a module and all arguments, with cuts and devices chosen where they are None."""
    devices, schedule, sample = given["devices"], given["schedule"], given["sample"]
    verify_unsplit(module)
    if type(module).__name__ == "OptimizedModule":
        raise TypeError("module is compiled as a whole: expected torch.compile(model) later, or compile=True.")
    if not called(module):
        raise TypeError(f"{type(module).__name__} has no forward, the method that is split: expected one that has.")
    names, homes = cuts_of_map(module) if devices is None else ([], [])
    if cuts is not None:
        wanted = verify_cuts(module, cuts)
        return wanted, {**given, "devices": homes if len(homes) == len(wanted) + 1 else devices}
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
    places, layered = _stages(rows, schedule), checks.is_layered(module)
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
    found = map_of(module, blocks, {}, [place.device for place in places])
    # A block whose tensors are all an earlier block's is where these are: accelerate runs it there.
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
        return checks.resolve_devices(devices)
    count = schedule.devices if isinstance(schedule, Schedule) else None
    found = checks.resolve_devices(homes) or checks.accelerators()
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
    parts = parts_of(module, where)
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
