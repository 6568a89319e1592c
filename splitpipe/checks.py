"""Checks of arguments. An error says what was found, what was expected, and what to do next."""
from __future__ import annotations

import math
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from splitpipe.core import stream
from splitpipe.core.stream import Device, Place
from splitpipe.schedule.check import check
from splitpipe.schedule.construct.library import build, options
from splitpipe.schedule.op import Schedule, counted, listed

Checkpoint = Literal["always", "except_last", "never"]
#: How many of the last microbatches aren't checkpointed; None: all of them.
UNCHECKPOINTED_TAIL: dict[str, int | None] = {"always": 0, "except_last": 1, "never": None}
_ONE_OF = f"one of {', '.join(map(repr, UNCHECKPOINTED_TAIL))}"


def number_of(name: str, value: object, what: str) -> float:
    """The value as a float; raises unless it is a finite number that isn't negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: expected a number, {what}.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}: expected {what}, finite and not negative.")
    return float(value)


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) if name else "the module itself" for name in names[:3]) + more


def verify_options(*, chosen: bool = False, own_loss: bool = False, **given: Any) -> None:
    """Raises if any of these arguments of SplitPipe has a wrong type or value.

    ``chosen``: whether None is allowed for arguments that can be chosen. ``own_loss``: whether the module's own loss is
    used if there is no ``loss_fn``.
    """
    for name, optional, has_type, has_value, expected in (
        ("chunks", chosen, is_integer, lambda x: x >= 1, "an int, at least 1 microbatch"),
        ("stash_limit", True, is_integer, lambda x: x >= 0, "an int, at least 0 bytes, which defer nothing"),
        ("deferred_batch_norm", False, _is(bool), None, "True or False"),
        ("checkpoint", True, _is(str), lambda x: x in UNCHECKPOINTED_TAIL, _ONE_OF),
        ("backward", False, _is(str), lambda x: x in ("split", "autograd"), "'split' or 'autograd'"),
        ("schedule", chosen, _is(str, Schedule), None, "one of splitpipe.schedule.names(), a Schedule"),
        ("loss_fn", True, lambda x: callable(x) and not isinstance(x, type), None,
         "a function of output and target, an instance, such as nn.MSELoss()"),
        ("split", True, callable, None, "a function split(args, kwargs, chunks)"),
        ("reduction", True, lambda x: callable(x) or isinstance(x, str), lambda x: callable(x) or x in ("mean", "sum"),
         "'mean' (weighted by rows), 'sum', or a function of the list of microbatches' values and that of their rows"),
        ("grad_scaler", True, _is(torch.amp.GradScaler), None, "the loop's torch.amp.GradScaler"),
    ):
        value = given.get(name)
        if name not in given or optional and value is None:
            continue
        message = f"{name} is {reprlib.repr(value)}: expected {expected}{', or None' if optional else ''}."
        if not has_type(value):
            raise TypeError(message)
        if has_value is not None and not has_value(value):
            raise ValueError(message)
    schedule, has_loss = given["schedule"], given["loss_fn"] is not None
    if schedule is not None and not has_loss and not own_loss:
        raise ValueError(
            f"schedule {getattr(schedule, 'name', schedule) or 'custom'!r} runs backward inside the forward, so it "
            "needs the loss there: expected loss_fn=criterion, and calls of the model with target=."
        )
    if schedule is not None and callable(given.get("reduction")):
        raise ValueError(
            "reduction= is a function, but a schedule runs backward before all losses are known: expected None, 'mean' "
            "or 'sum', or a loss_fn that returns a pair (total, count)."
        )
    if schedule is None and has_loss:
        raise ValueError("loss_fn is given without a schedule, which would call it: expected both or neither.")
    if given.get("grad_scaler") is not None and not has_loss and (schedule is None or not own_loss):
        raise ValueError(
            "grad_scaler is given without loss_fn: expected None, since scaler.scale(loss) works as usual."
        )


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_MEASURE = "splitpipe.balance.balance_by_time(stages, module, sample) measures the layers, and returns a balance."


def is_layered(module: object) -> TypeGuard[nn.Sequential]:
    """True for an nn.Sequential that is called as one, so that stages can call its layers."""
    return isinstance(module, nn.Sequential) and all(
        getattr(getattr(module, name), "__func__", None) is getattr(nn.Sequential, name)
        for name in ("__call__", "forward")
    )


def verify_module(module: Any) -> None:
    """Raises unless the module is an nn.Sequential whose layers stages can call."""
    if not is_layered(module):
        own = " with its own forward" if isinstance(module, nn.Sequential) else ""
        raise TypeError(
            f"module is a {type(module).__name__}{own}: expected an nn.Sequential, whose layers can be divided into "
            "stages. Write the model as nn.Sequential(layer, layer, ...). For any other module, SplitPipe takes "
            "cuts=[...] instead of balance."
        )
    verify_supported(module)


def verify_supported(module: nn.Module) -> None:
    """Raises for FSDP, and TorchScript: its calls can't be intercepted, nor its parameters replaced by copies."""
    verify_ungathered(module)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"{some([name])} is a torch.jit.ScriptModule: expected modules whose forward is Python.")


def verify_ungathered(module: nn.Module) -> None:
    """Raises for FSDP, which runs collectives per call of a module: a pipeline makes one call per microbatch."""
    # FSDP would mistake the end of a microbatch's backward for the end of the module's, and miss later gradients.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # It wraps nothing.
        return
    kinds = fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    found = [name for name, part in module.named_modules() if isinstance(part, kinds)]
    if found:
        raise TypeError(
            f"FSDP (fully_shard) has {some(found)}: expected modules with whole parameters, as it would lose gradients "
            "of layers that are called once per microbatch. For data parallelism, use "
            "DistributedDataParallel(SplitPipe(...)); for a model too large for one process's devices, more processes "
            "with splitpipe.distributed.Pipeline."
        )


def verify_balance(balance: Iterable[int] | None, layers: int) -> list[int]:
    """The balance as a list of positive ints, which must sum to the number of layers."""
    found = listed(balance)
    if found is None or not all(map(is_integer, found)):
        raise TypeError(f"balance is {balance!r}: expected a list of ints, the layers of each stage. {_MEASURE}")
    numbers = [operator.index(number) for number in found]
    if min(numbers, default=0) < 1 or sum(numbers) != layers:
        raise ValueError(
            f"balance {numbers} sums to {sum(numbers)}, but the module has {counted(layers, 'layer')}: expected at "
            f"least one stage, and numbers above 0 that sum to the layers. {_MEASURE}"
        )
    return numbers


def is_integer(number: Any) -> bool:
    """True for an int, also of NumPy; bools don't count."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def verify_devices(devices: Iterable[Device | Place] | None, stages: int) -> list[Place]:
    """One place per stage. If there are more devices than stages, the last ones are unused."""
    places = accelerators() if devices is None else resolve_devices(devices)
    if devices is None and not places:
        return [Place(torch.device("cpu"))] * stages
    if len(places) < stages:
        raise ValueError(
            f"{counted(len(places), 'device')} ({', '.join(map(str, places)) or 'none'}) for "
            f"{counted(stages, 'stage')}: expected {stages}, one per stage. Give {stages} (a device may be repeated)."
        )
    return places[:stages]


def accelerators() -> list[Place]:
    """All accelerators of the machine, possibly none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [Place(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())]


def resolve_devices(devices: Iterable[Device | Place]) -> list[Place]:
    """The given devices, each with its index."""
    found = listed(devices)
    if found is None:
        raise TypeError(f"devices is {devices!r}: expected a list with one per stage, such as ['cuda:0', 'cuda:1'].")
    return [_place(f"devices[{number}]", device) for number, device in enumerate(found)]


def resolve_device(device: object) -> torch.device:
    """The device that an argument names, with its index. None: the current accelerator, or the CPU without one."""
    default = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return _device("device", default if device is None else device)


def _place(name: str, device: Device | Place) -> Place:
    if isinstance(device, torch.Stream):
        return Place(device.device, stream.of_device_class(device))
    return device if isinstance(device, Place) else Place(_device(name, device))


def _device(name: str, device: object) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (torch.device, int, str)):
        raise TypeError(f"{name} is {device!r}: expected a torch.device, an index, or a string such as 'cuda:0'.")
    known = [torch.device("cpu"), *[place.device for place in accelerators()]]
    try:
        found = torch.device(device)
    except (RuntimeError, ValueError):  # For example, an index that is too large for any device.
        found = torch.device("meta")
    if found.type == "cpu":
        return known[0]
    if found.index is None and known[1:]:
        found = torch.device(found.type, torch.accelerator.current_device_index())
    if found not in known:
        raise ValueError(f"{name} is {device!r}, which isn't available: expected one of {', '.join(map(str, known))}.")
    return found


def resolve_schedule(schedule: str | Schedule, stages: int, devices: int | None, chunks: int) -> Schedule:
    """The schedule, verified, or built from its name. If ``devices`` is None, it has as many as it needs."""
    if isinstance(schedule, str):
        return _built(schedule, stages, devices, chunks)
    check(schedule)
    devices = schedule.devices if devices is None else devices
    if (schedule.stages, schedule.devices, schedule.microbatches) != (stages, devices, chunks):
        raise ValueError(
            f"the schedule does not fit: it has {counted(schedule.stages, 'stage')}, "
            f"{counted(schedule.devices, 'row')} and {counted(schedule.microbatches, 'microbatch')}: expected "
            f"{stages}, as balance or cuts have, {devices}, one per device, and {chunks}, as chunks is."
        )
    return schedule


def _built(name: str, stages: int, devices: int | None, chunks: int) -> Schedule:
    each, free = build(name, 1, 1).stages, "stages_per_device" in options(name)
    devices = max(1, stages // each) if devices is None else devices
    own = {"stages_per_device": stages // devices} if free and devices else {}
    if stages == devices * own.get("stages_per_device", each):
        return build(name, devices, chunks, **own)
    want = "a multiple of the number of devices" if free else f"{counted(each, 'stage')} per device"
    wanted = each * max(1, devices)
    raise ValueError(
        f"the model has {counted(stages, 'stage')} for {counted(devices, 'device')}: schedule {name!r} expects {want}. "
        f"Give a balance of {counted(wanted, 'number')} or {counted(wanted - 1, 'cut')}, or other devices."
    )
