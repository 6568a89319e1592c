"""An nn.Sequential cut into stages by balance, each on its device.

Everything is checked before anything moves, and all that is wrong with an argument is said at once.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core import stream
from splitpipe.core.dtensor import gathered, groups, sharded
from splitpipe.schedule.op import listed

Device = torch.device | int | str | torch.Stream

_MEASURE = """
A balance that fits can be measured, on the layers' own times:

    from splitpipe.balance import balance_by_time
    balance = balance_by_time({devices}, module, sample)    # sample: an input of one microbatch
    model = SplitPipe(module, balance, ...)"""


class TooFewDevicesError(ValueError, IndexError):
    """Fewer devices than stages: a ValueError, and the IndexError that torchgpipe's users catch."""


@dataclass(frozen=True)
class Place:
    """Where a stage computes: a device and, if the user gave one, the stream of it to compute on.

    Args:
        device: of the stage.
        stream: of the class that all streams have here.
        given: what the user gave as the stream, which may be what keeps it alive.
    """

    device: torch.device
    stream: torch.Stream | None = None
    given: object = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: object) -> Place:
        return self

    def __reduce__(self) -> tuple[type[Place], tuple[torch.device]]:
        # A stream belongs to its process: whoever unpickles computes on the device's current one.
        return Place, (self.device,)

    def __str__(self) -> str:
        return str(self.device)


def verify_module(module: object) -> None:
    """Refuses what is no plain nn.Sequential."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module is a {type(module).__name__}: expected an nn.Sequential, whose layers can be cut into stages. "
            "Write the model as nn.Sequential(layer, layer, ...)."
        )
    if getattr(module.forward, "__func__", None) is not nn.Sequential.forward:
        raise TypeError(
            f"module is a {type(module).__name__}, whose forward() is its own: expected nn.Sequential's, since stages "
            "call the layers one after the other. Move that code into a layer."
        )


def verify_ungathered(module: nn.Module) -> None:
    """Refuses FSDP, whose collectives go with the calls of a module: processes have as many calls as microbatches.

    What it takes for the end of a module's backward is that of a microbatch: later gradients it would not see.
    """
    found = gathered(module)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        names = ", ".join(repr(name) if name else "the module itself" for name in found[:3])
        raise TypeError(
            f"FSDP (fully_shard) has {names}{more}: expected modules with whole parameters. FSDP gathers and frees "
            "parameters and reduces gradients around each call of a module, on one device a process. A pipeline calls "
            "a layer once for each microbatch, and goes backward in an order of its own, on several devices: processes "
            "would wait for each other, and gradients be lost. For data parallelism use "
            "DistributedDataParallel(SplitPipe(...)); for a model that is too large for a process's devices, more "
            "processes with splitpipe.distributed.Pipeline."
        )


def verify_balance(balance: Iterable[int] | None, layers: int) -> list[int]:
    """The balance as a list of positive ints that sum to the number of layers."""
    hint = _MEASURE.format(devices="devices")
    if balance is None:
        raise ValueError(
            "balance is required: expected one number of layers a stage, that sum to the module's "
            f"{layers} layers.\n{hint}"
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
        faults.append(f"it sums to {sum(numbers)}, but the module has {layers} layers")
    if faults:
        hint = _MEASURE.format(devices=len(numbers))
        raise ValueError(
            f"balance {numbers} doesn't fit: {'; '.join(faults)}. Expected numbers above 0 that sum to the layers."
            f"\n{hint}"
        )
    return numbers


def is_integer(number: Any) -> bool:
    """Whether it is a whole number, of whatever type; a truth value is none."""
    try:
        operator.index(number)
    except TypeError:
        return False
    return not isinstance(number, bool) and getattr(number, "dtype", None) is not torch.bool


def verify_listed(devices: Iterable[Device] | None, stages: int) -> list[Device] | None:
    """The devices that were named, in a list; None if none were."""
    found = listed(devices)
    if devices is not None and found is None:
        raise TypeError(f"devices is {devices!r}: expected a list with one a stage, such as {_example(stages)}.")
    return found


def verify_devices(devices: Iterable[Device] | None, stages: int) -> list[Place]:
    """One place a stage. More devices than stages leave the last ones unused."""
    if devices is None:
        if not torch.accelerator.is_available():
            return [Place(torch.device("cpu"))] * stages
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    places: list[Place] = []
    faults: list[TypeError | ValueError] = []
    for number, device in enumerate(verify_listed(devices, stages) or ()):
        try:
            places.append(_place(number, device))
        except (TypeError, ValueError) as fault:
            faults.append(fault)
    if faults:
        raise type(faults[0])("\n".join(map(str, faults)))
    if len(places) < stages:
        raise TooFewDevicesError(
            f"{len(places)} devices ({', '.join(map(str, places)) or 'none'}) for {stages} stages: expected {stages}, "
            f"one a stage. Name {stages} (one may be named twice), or give a balance of {len(places) or 1} numbers."
        )
    return places[:stages]


def _example(stages: int) -> str:
    return repr(["cpu"] * stages)


def _place(number: int, device: Device) -> Place:
    if isinstance(device, torch.Stream):
        return Place(device.device, stream.known(device), device)
    if isinstance(device, bool) or not isinstance(device, (torch.device, int, str)):
        raise TypeError(
            f"devices[{number}] is {device!r}: expected a torch.device, an index, a string such as 'cuda:0', or a "
            "torch.Stream."
        )
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind else 0
    there = "cpu" + (f" and {kind.type}:0 to {kind.type}:{count - 1}" if kind else "")
    try:
        found = torch.device(device)
    except (RuntimeError, ValueError) as error:  # Of an index that is too large for any.
        raise ValueError(f"devices[{number}] is {device!r}, no device here: expected one of {there}.") from error
    if found.type == "cpu":
        return Place(torch.device("cpu"))
    if kind is None or found.type != kind.type or (found.index is not None and found.index >= count):
        raise ValueError(f"devices[{number}] is {device!r}, which isn't available: expected one of {there}.")
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    return Place(torch.device(found.type, index))


def spans(balance: Sequence[int]) -> list[tuple[int, int]]:
    """First layer of each stage, and the one after its last."""
    ends = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return [(end - number, end) for end, number in zip(ends, balance)]


def tensors(layers: Iterable[nn.Module]) -> dict[int, tuple[str, Tensor]]:
    """Parameters and buffers of some layers, once each, by identity, with a name of theirs."""
    found: dict[int, tuple[str, Tensor]] = {}
    for layer in layers:
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            found.setdefault(id(tensor), (f"{type(layer).__name__}.{name}", tensor))
    return found


def verify_stages(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Refuses layers that can't run where they are to."""
    verify_sharing(stages, places)
    verify_graphs(stages, places)


def verify_graphs(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Refuses layers compiled to CUDA graphs with a torch that can't run these in our threads (pytorch#123177)."""
    if torch.__version__ >= "2.13":
        return
    found = [
        f"{type(getattr(part, '_orig_mod', part)).__name__} in stage {stage} ({place})"
        for stage, (layers, place) in enumerate(zip(stages, places)) if place.device.type != "cpu"
        for layer in layers for part in layer.modules() if _graphed(part)
    ]
    if found:
        raise ValueError(
            f"{'; '.join(found)}: compiled to CUDA graphs, which torch {torch.__version__} can't run in threads. "
            "Expected torch 2.13 or newer, or torch.compile without mode='reduce-overhead'; in place of "
            "mode='max-autotune' there is 'max-autotune-no-cudagraphs'."
        )


def _graphed(part: nn.Module) -> bool:
    # torch.compile(part) has the method itself; part.compile() leaves a function that has it.
    config = vars(part).get("get_compiler_config") or getattr(part._compiled_call_impl, "get_compiler_config", None)
    return config is not None and bool((config() or {}).get("triton.cudagraphs"))


def verify_sharing(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Refuses a parameter or buffer that stages on different devices would need at once."""
    first: dict[int, int] = {}
    faults = []
    for stage, layers in enumerate(stages):
        for key, (name, _) in tensors(layers).items():
            home = first.setdefault(key, stage)
            if places[home].device != places[stage].device:
                faults.append(
                    f"  {name} of stage {stage} ({places[stage]}) is also in stage {home} ({places[home]})"
                )
    if faults:
        raise ValueError(
            "the module shares parameters or buffers between stages on different devices:\n" + "\n".join(faults)
            + "\nA tensor lives on one device. Choose a balance that puts the layers that share it in one stage, name "
            "one device for these stages, or give each layer a copy of its own (copy.deepcopy)."
        )


def verify_groups(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Refuses a process group that stages on different devices have in common, where autograd goes backward itself.

    It has a thread for each device. Two threads that ask one group for collectives do so in another order in each
    process, which waits forever then, or mixes up their values.
    """
    first: dict[str, tuple[int, str]] = {}
    faults = []
    for stage, layers in enumerate(stages):
        for group, name in groups(layers).items():
            home, known = first.setdefault(group, (stage, name))
            if places[home].device != places[stage].device:
                faults.append(
                    f"  group {group!r} of {name} in stage {stage} ({places[stage]}) is also that of {known} in stage "
                    f"{home} ({places[home]})"
                )
    if faults:
        raise ValueError(
            "stages on different devices share a process group, and backward, which has a thread for each device, "
            "would ask it for collectives in another order in each process:\n" + "\n".join(faults)
            + "\nExpected a group for each stage: DeviceMesh.from_group(dist.new_group(ranks), device_type, "
            "mesh_dim_names=('a name of its own',)). Or choose a schedule, such as schedule='1f1b' with a loss_fn: one "
            "thread goes backward then, in the same order everywhere."
        )


def workers(
    stages: Sequence[Sequence[nn.Module]], places: Sequence[Place], rows: Sequence[int] | None = None
) -> list[int]:
    """The worker of each stage: one an accelerator; on the CPU one a row, but one for stages that share a buffer.

    Two threads that update one buffer lose updates; one thread takes its stages in the order of the clock.

    With DTensors, all stages have one worker, which asks for collectives in the same order in every process, also where
    stages share a process group. So does backward on the CPU, then: its order is that of the nodes' numbers. What would
    break it: a worker for each group. A stage may hold the process's random numbers (see ``randomness``), and of two
    that wait in collectives for each other's process meanwhile, each would keep the other from going on.

    Args:
        stages: the layers of each stage.
        places: of each stage.
        rows: the row of a schedule that each stage is in; None: each its own.
    """
    if any(map(sharded, stages)):
        return [0] * len(stages)
    buffers = [{id(buffer) for layer in layers for buffer in layer.buffers()} for layers in stages]
    first = list(range(len(stages)))  # Of the stages that have the worker of this one.
    for stage, place in enumerate(places[: len(stages)]):
        for other in range(stage):
            bound = place.device.type != "cpu" or buffers[other] & buffers[stage]
            if rows is not None and rows[other] == rows[stage] or (places[other].device == place.device and bound):
                # A stage that shares with several brings their workers together.
                joined, into = max(first[other], first[stage]), min(first[other], first[stage])
                first = [into if found == joined else found for found in first]
    numbers = sorted(set(first))
    return [numbers.index(found) for found in first]


def move(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> Callable[[], None]:
    """Moves each stage's layers to its device; gives the call that undoes it. If one can't be moved, none is."""
    parts = [part for layers in stages for layer in layers for part in layer.modules()]
    slots = [(held, dict(held.items())) for part in parts for held in _slots(part)]
    parameters = [tensor for _, was in slots[::2] for tensor in was.values() if tensor is not None]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    tensors = [*parameters, *(gradient for _, gradient in gradients if gradient is not None)]
    before = [(tensor, tensor.data) for tensor in tensors]

    def undo() -> None:
        for tensor, data in before:
            tensor.data = data
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for held, was in slots:
            for name, tensor in was.items():
                held[name] = tensor

    try:
        for layers, place in zip(stages, places):
            for layer in layers:
                # Not layer.to(device), which a layer that places its own tensors, such as a pipeline, may refuse.
                layer._apply(partial(_to, device=place.device))
    except BaseException:
        undo()
        raise
    return undo


def _slots(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return part._parameters, part._buffers


def _to(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device)
