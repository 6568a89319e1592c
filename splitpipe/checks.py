"""Checks of arguments: the module, balance, devices, schedule and options of SplitPipe, and numbers in general.

An error lists all that is wrong with an argument: what was found, what was expected, and what to do next.
"""
from __future__ import annotations

import inspect
import math
import operator
import reprlib
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from splitpipe.core import stream
from splitpipe.core.dtensor import gathered
from splitpipe.core.stream import Device, Place
from splitpipe.schedule.check import check
from splitpipe.schedule.construct.library import build, options
from splitpipe.schedule.op import Schedule, listed
from splitpipe.schedule.plurals import counted

Checkpoint = Literal["always", "except_last", "never"]
#: How many of the last microbatches aren't checkpointed; None: all of them.
UNCHECKPOINTED_TAIL: dict[str, int | None] = {"always": 0, "except_last": 1, "never": None}
_ONE_OF = f"one of {', '.join(map(repr, UNCHECKPOINTED_TAIL))}"


def number_of(name: str, value: object, what: str) -> float:
    """The value as a float; raises unless it is a finite number that isn't negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: expected a number, {what}.")
    if not 0 <= finite(value) < math.inf:
        raise ValueError(f"{name} is {value!r}: expected {what}, finite and not negative.")
    return finite(value)


def finite(value: Real) -> float:
    """The number as a float, infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def verify_options(
    *,
    chunks: Any,
    schedule: Any,
    loss_fn: object,
    chosen: bool = False,
    checkpoint: object = None,
    deferred_batch_norm: object = False,
    backward: object = "split",
    grad_scaler: object = None,
    stash_limit: Any = None,
    own_loss: bool = False,
) -> None:
    """Raises if any of SplitPipe's arguments has a wrong value, with all faults in one error.

    ``chosen``: whether None is allowed for arguments that can be chosen. ``own_loss``: whether the module's own loss is
    used if there is no ``loss_fn``.
    """
    for name, value, fits, expected in (
        (
            "chunks", chunks, chosen and chunks is None or is_integer(chunks),
            "an int, the number of microbatches" + ", or None for four per device" * chosen,
        ),
        ("stash_limit", stash_limit, stash_limit is None or is_integer(stash_limit), "an int, in bytes, or None"),
        ("deferred_batch_norm", deferred_batch_norm, isinstance(deferred_batch_norm, bool), "True or False"),
        ("checkpoint", checkpoint, checkpoint is None or isinstance(checkpoint, str), f"{_ONE_OF}, or None"),
        ("backward", backward, isinstance(backward, str), "'split' or 'autograd'"),
        (
            "schedule", schedule, isinstance(schedule, (str, Schedule)),
            "a name, one of splitpipe.schedule.names(), or a splitpipe.schedule.Schedule",
        ),
        ("loss_fn", loss_fn, loss_fn is None or callable(loss_fn), "a function of output and target"),
        (
            "grad_scaler", grad_scaler, grad_scaler is None or isinstance(grad_scaler, torch.amp.GradScaler),
            "the loop's torch.amp.GradScaler",
        ),
    ):
        if not fits:
            raise TypeError(f"{name} is {reprlib.repr(value)}: expected {expected}.")
    faults = []
    if stash_limit is not None and operator.index(stash_limit) < 0:
        faults.append(f"stash_limit is {stash_limit}: expected at least 0 bytes, which defer nothing.")
    if chunks is not None and operator.index(chunks) < 1:
        faults.append(f"chunks is {chunks}: expected at least 1 microbatch.")
    if checkpoint is not None and checkpoint not in tuple(UNCHECKPOINTED_TAIL):
        faults.append(f"checkpoint is {checkpoint!r}: expected {_ONE_OF}, or None.")
    if backward not in ("split", "autograd"):
        faults.append(f"backward is {backward!r}: expected 'split' or 'autograd'.")
    if schedule != "gpipe" and loss_fn is None and not own_loss:
        name = getattr(schedule, "name", schedule) or "custom"
        faults.append(
            f"schedule {name!r} runs backward inside the forward, so it needs the loss there: expected "
            "loss_fn=criterion, and calls of the model with target=."
        )
    if grad_scaler is not None and loss_fn is None and (schedule == "gpipe" or not own_loss):
        faults.append("grad_scaler is given without loss_fn: expected None, since scaler.scale(loss) works as usual.")
    if faults:
        raise ValueError("\n".join(faults))


_MEASURE = """
Measure the layers to find a balance that fits:

    from splitpipe.balance import balance_by_time
    balance = balance_by_time({devices}, module, sample)    # sample: an input of one microbatch
    model = SplitPipe(module, balance, ...)"""


class TooFewDevicesError(ValueError, IndexError):
    """Fewer devices than stages. A ValueError, and also the IndexError that torchgpipe's users catch."""


#: Methods that other code calls on a module, so they must be nn.Sequential's. Printing may be overridden.
_METHODS = [
    name for name, value in inspect.getmembers(nn.Sequential, inspect.isfunction)
    if not name.startswith("_") and name != "extra_repr"
] + ["__call__"]


def verify_module(module: object) -> None:
    """Raises unless the module is a plain nn.Sequential."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module is a {type(module).__name__}: expected an nn.Sequential, whose layers can be divided into stages. "
            "Write the model as nn.Sequential(layer, layer, ...). For any other module, SplitPipe takes "
            "cuts=[...] instead of balance."
        )
    if getattr(module.forward, "__func__", None) is not nn.Sequential.forward:
        raise TypeError(
            f"module is a {type(module).__name__} with a custom forward(): expected nn.Sequential's, since stages "
            "call the layers one after the other. Move that code into a layer."
        )
    own = [name for name in _METHODS if getattr(type(module), name) is not getattr(nn.Sequential, name)]
    if own:
        raise TypeError(
            f"module is a {type(module).__name__} that overrides {', '.join(own)}: expected nn.Sequential's, because "
            "the pipeline is a module of another class, which would not call it. Move that code into a layer, or "
            "into a subclass of SplitPipe, and wrap nn.Sequential(*module)."
        )
    verify_python(module)


def is_layered(module: object) -> TypeGuard[nn.Sequential]:
    """True for an nn.Sequential whose layers stages can call, which ``verify_module`` accepts."""
    return (
        isinstance(module, nn.Sequential) and getattr(module.forward, "__func__", None) is nn.Sequential.forward
        and all(getattr(type(module), name) is getattr(nn.Sequential, name) for name in _METHODS)
    )


def verify_python(module: nn.Module) -> None:
    """Raises for TorchScript: its calls can't be intercepted, nor its parameters replaced by copies."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            found = repr(name) if name else "module"
            raise TypeError(
                f"{found} is a torch.jit.ScriptModule: expected modules whose forward is Python code, such as the one "
                "that it was made from."
            )


def verify_ungathered(module: nn.Module) -> None:
    """Raises for FSDP, which runs collectives per call of a module: a pipeline makes one call per microbatch."""
    # FSDP would mistake the end of a microbatch's backward for the end of the module's, and miss later gradients.
    found = gathered(module)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        names = ", ".join(repr(name) if name else "the module itself" for name in found[:3])
        raise TypeError(
            f"FSDP (fully_shard) has {names}{more}: expected modules with whole parameters. FSDP gathers and frees "
            "parameters and reduces gradients around each call of a module, on one device per process. A pipeline "
            "calls a layer once per microbatch, and runs backward in a different order, on several devices, so "
            "processes would wait for each other and gradients would be lost. For data parallelism, use "
            "DistributedDataParallel(SplitPipe(...)); for a model that is too large for one process's devices, use "
            "more processes with splitpipe.distributed.Pipeline."
        )


def verify_balance(balance: Iterable[int] | None, layers: int) -> list[int]:
    """The balance as a list of positive ints, which must sum to the number of layers."""
    hint = _MEASURE.format(devices="devices")
    if balance is None:
        raise ValueError(
            "balance is required: expected the number of layers of each stage, in sum the module's "
            f"{counted(layers, 'layer')}.\n{hint}"
        )
    found = listed(balance)
    if found is None:
        raise TypeError(f"balance is {balance!r}: expected a list of ints, the layers of each stage.\n{hint}")
    strange = [f"balance[{stage}] is {number!r}" for stage, number in enumerate(found) if not is_integer(number)]
    if strange:
        raise TypeError(f"{'; '.join(strange)}: expected an int, the layers of the stage.\n{hint}")
    numbers = [operator.index(number) for number in found]
    faults = []
    if not numbers:
        faults.append("it is empty: expected at least one stage")
    if any(number <= 0 for number in numbers):
        faults.append("every stage needs at least one layer")
    if sum(numbers) != layers:
        faults.append(f"it sums to {sum(numbers)}, but the module has {counted(layers, 'layer')}")
    if faults:
        raise ValueError(
            f"balance {numbers} doesn't fit: {'; '.join(faults)}. Expected numbers above 0 that sum to the layers.\n"
            + _MEASURE.format(devices=len(numbers))
        )
    return numbers


def is_integer(number: Any) -> bool:
    """True for whole numbers of any type; bools don't count."""
    try:
        operator.index(number)
    except TypeError:
        return False
    return not isinstance(number, bool) and getattr(number, "dtype", None) is not torch.bool


def verify_listed(devices: Iterable[Device] | None, stages: int) -> list[Device] | None:
    """The given devices in a list, or None."""
    found = listed(devices)
    if devices is not None and found is None:
        raise TypeError(f"devices is {devices!r}: expected a list with one per stage, such as {['cpu'] * stages}.")
    return found


def verify_devices(devices: Sequence[Device] | None, stages: int) -> list[Place]:
    """One place per stage. If there are more devices than stages, the last ones are unused."""
    if devices is None:
        places = accelerators()
        if not places:
            return [Place(torch.device("cpu"))] * stages
    else:
        places = resolve_devices(devices)
    if len(places) < stages:
        raise TooFewDevicesError(
            f"{counted(len(places), 'device')} ({', '.join(map(str, places)) or 'none'}) for "
            f"{counted(stages, 'stage')}: expected {stages}, "
            f"one per stage. Give {stages} (a device may be repeated), or give a balance of "
            f"{counted(len(places) or 1, 'number')}."
        )
    return places[:stages]


def accelerators() -> list[Place]:
    """All accelerators of the machine, possibly none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [] if kind is None else [
        Place(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())
    ]


def resolve_devices(devices: Iterable[Device]) -> list[Place]:
    """The given devices, each with its index."""
    found = listed(devices)
    if found is None:
        raise TypeError(f"devices is {devices!r}: expected a list with one per stage, such as ['cuda:0', 'cuda:1'].")
    places: list[Place] = []
    faults: list[TypeError | ValueError] = []
    for number, device in enumerate(found):
        try:
            places.append(_place(f"devices[{number}]", device))
        except (TypeError, ValueError) as fault:
            faults.append(fault)
    if faults:
        raise type(faults[0])("\n".join(map(str, faults)))
    return places


def resolve_device(device: object) -> torch.device:
    """The device that an argument names, with its index. None: the current accelerator, or the CPU without one."""
    if device is None:
        kind = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if kind is None else kind.type
    return _device("device", device, "a torch.device, an index, or a string such as 'cuda:0'")


def resolve_schedule(
    schedule: str | Schedule, stages: int, devices: int | None, chunks: int, stages_from: str = "balance"
) -> Schedule:
    """The schedule, verified, or built from its name. If ``devices`` is None, it has as many as it needs."""
    if isinstance(schedule, str):
        return _built(schedule, stages, devices, chunks, stages_from)
    check(schedule)
    faults = []
    if schedule.stages != stages:
        faults.append(f"it has {counted(schedule.stages, 'stage')}: expected {stages}, {_STAGES[stages_from]}")
    if devices is not None and schedule.devices != devices:
        faults.append(f"it has {counted(schedule.devices, 'row')}: expected {devices}, one per device")
    if schedule.microbatches != chunks:
        faults.append(f"it has {counted(schedule.microbatches, 'microbatch')}: expected {chunks}, the number of chunks")
    if faults:
        raise ValueError(f"the schedule does not fit: {'; '.join(faults)}.")
    return schedule


def resolve_chunks(
    chunks: Any, schedule: str | Schedule, devices: Sequence[Device] | None, stages: int
) -> int:
    """The number of microbatches. Default: those of a Schedule, or else four per device."""
    if chunks is not None:
        return operator.index(chunks)
    if isinstance(schedule, Schedule):
        return schedule.microbatches
    each = build(schedule, 1, 1).stages
    return 4 * max(1, stages // each if devices is None else min(len(devices), stages))


def resolve_places(
    schedule: str | Schedule, drop_in: bool, devices: Sequence[Device] | None, stages: int, chunks: int,
    stages_from: str = "balance",
) -> tuple[Schedule | None, list[Place]]:
    """The schedule (None if drop-in) and the place of each stage."""
    if drop_in:
        return None, verify_devices(devices, stages)
    plan = resolve_schedule(schedule, stages, None if devices is None else len(devices), chunks, stages_from)
    rows = verify_devices(devices, plan.devices)
    return plan, [rows[device] for device in plan.placement]


#: What the number of stages follows from.
_STAGES = {"balance": "one per number of the balance", "cuts": "one more than there are cuts"}


def _built(name: str, stages: int, devices: int | None, chunks: int, stages_from: str) -> Schedule:
    each = build(name, 1, 1).stages
    free = "stages_per_device" in options(name)
    if devices is None:
        devices = max(1, stages // each)
    if devices and stages == devices * each:
        return build(name, devices, chunks)
    if free and devices and stages % devices == 0:
        return build(name, devices, chunks, stages_per_device=stages // devices)
    number = "one stage" if each == 1 else f"{each} stages"
    want = "a multiple of the number of devices" if free else f"{number} per device"
    wanted = each * max(1, devices)
    fix = f"Give a balance of {counted(wanted, 'number')}, or other devices."
    if stages_from == "cuts":
        fix = f"Give {counted(wanted - 1, 'cut')}, or other devices."
    found = f"{counted(stages, 'stage')} for {counted(devices, 'device')}"
    raise ValueError(f"{stages_from} has {found}: schedule {name!r} expects {want}. {fix}")


def _place(name: str, device: Device) -> Place:
    if isinstance(device, torch.Stream):
        return Place(device.device, stream.of_device_class(device), device)
    return Place(_device(name, device, "a torch.device, an index, a string such as 'cuda:0', or a torch.Stream"))


def _device(name: str, device: object, expected: str) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (torch.device, int, str)):
        raise TypeError(f"{name} is {device!r}: expected {expected}.")
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind else 0
    there = "cpu" + (f" and {kind.type}:0 to {kind.type}:{count - 1}" if kind else "")
    try:
        found = torch.device(device)
    except (RuntimeError, ValueError) as error:  # For example, an index that is too large for any device.
        raise ValueError(f"{name} is {device!r}, which isn't a device here: expected one of {there}.") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if kind is None or found.type != kind.type or (found.index is not None and found.index >= count):
        raise ValueError(f"{name} is {device!r}, which isn't available: expected one of {there}.")
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    return torch.device(found.type, index)
