"""An nn.Sequential divided into stages by balance, each on its device.

Everything is checked before anything is moved.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splitpipe.compiled.layers import compiled_call
from splitpipe.core.dtensor import groups, sharded
from splitpipe.core.stream import Place, Stream, is_default
from splitpipe.partition.moving import moved, moves_itself


def spans(balance: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one after its last."""
    ends = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return [(end - number, end) for end, number in zip(ends, balance)]


def _tensors(layers: Iterable[nn.Module]) -> dict[int, str]:
    """A name for each parameter and buffer of some layers, by identity."""
    found: dict[int, str] = {}
    for layer in layers:
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            found.setdefault(id(tensor), f"{type(layer).__name__}.{name}")
    return found


def verify_stages(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Raises for layers that can't run on their stage's place."""
    verify_sharing(stages, places)
    verify_graphs(stages, places)


def verify_graphs(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Raises for layers compiled to CUDA graphs if torch can't run these in our threads (pytorch#123177)."""
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
            "Expected torch 2.13 or newer, or torch.compile without mode='reduce-overhead'; use "
            "mode='max-autotune-no-cudagraphs' instead of mode='max-autotune'."
        )


def _graphed(part: nn.Module) -> bool:
    # torch.compile(part) has the method itself; part.compile() leaves a function that has it.
    config = vars(part).get("get_compiler_config") or getattr(compiled_call(part), "get_compiler_config", None)
    return config is not None and bool((config() or {}).get("triton.cudagraphs"))


def verify_sharing(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Raises for a parameter or buffer that stages on different devices share."""
    faults = [
        f"  {name} of stage {stage} ({places[stage]}) is also in stage {home} ({places[home]})"
        for _, stage, name, home, _ in _shared_across_devices(map(_tensors, stages), places)
    ]
    if faults:
        raise ValueError(
            "the module shares parameters or buffers between stages on different devices:\n" + "\n".join(faults)
            + "\nA tensor is on one device. Choose a balance that puts the layers that share it into one stage, use "
            "one device for these stages, or give each layer a separate copy (copy.deepcopy)."
        )


def verify_groups(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Raises for a process group that stages on different devices share, if autograd runs backward itself."""
    # Autograd has a thread per device. Two threads that ask one group for collectives do so in a different order in
    # each process, which then waits forever, or mixes up their values.
    faults = [
        f"  group {group!r} of {name} in stage {stage} ({places[stage]}) is also the group of {known} in stage {home} "
        f"({places[home]})"
        for group, stage, name, home, known in _shared_across_devices(map(groups, stages), places)
    ]
    if faults:
        raise ValueError(
            "stages on different devices share a process group, and backward, which has a thread per device, "
            "would ask it for collectives in a different order in each process:\n" + "\n".join(faults)
            + "\nExpected a group per stage: DeviceMesh.from_group(dist.new_group(ranks), device_type, "
            "mesh_dim_names=('a unique name',)). Or choose a schedule, such as schedule='1f1b' with a loss_fn: one "
            "thread then runs backward, in the same order everywhere."
        )


def _shared_across_devices(
    stages: Iterable[dict[Any, str]], places: Sequence[Place]
) -> Iterator[tuple[Any, int, str, int, str]]:
    """What stages on different devices share: the thing, stage, name there, first stage, name there."""
    first: dict[Any, tuple[int, str]] = {}
    for stage, found in enumerate(stages):
        for thing, name in found.items():
            home, known = first.setdefault(thing, (stage, name))
            if places[home].device != places[stage].device:
                yield thing, stage, name, home, known


def verify_streams(layers: Iterable[nn.Module], streams: Sequence[Stream]) -> None:
    """Raises for a forward whose gradients DistributedDataParallel would reduce on another stream than theirs."""
    # The autograd thread that fills a bucket reduces it, and full ones after it, even if these are on other devices.
    # It does so on the stream that is current in that thread for the bucket's device: the default stream. In the
    # device's own thread, that is only the stream of the last gradient. So gradients of other streams may be read
    # before they are computed. None of our code runs in between: DDP's hook copies the gradient and reduces in one go.
    if all(map(is_default, streams)) or not torch.is_grad_enabled():
        return
    if len({(each.device_index, each.stream_id) for each in streams if each is not None}) == 1:
        return
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)  # Set while its forward runs.
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    reduced = {id(parameter) for parameter in wrapper.module.parameters()}
    if any(id(parameter) in reduced for layer in layers for parameter in layer.parameters()):
        found = sorted({f"stream {each.stream_id} of {each.device}" for each in streams if each is not None})
        raise RuntimeError(
            "a SplitPipe inside DistributedDataParallel computes on streams other than their devices' default "
            f"streams: {', '.join(found)} (0 is the default). DistributedDataParallel starts to reduce the gradients "
            "of one device in another device's thread, on the default stream, and would read some before they are "
            "computed. Expected devices rather than streams, and a call outside `with torch.cuda.stream(...)`."
        )


def workers(
    stages: Sequence[Sequence[nn.Module]], places: Sequence[Place], rows: Sequence[int] | None = None
) -> list[int]:
    """The worker of each stage: one per accelerator; on the CPU one per row, or per set of stages that share state."""
    # Two threads that update one buffer lose updates, and two that call one layer could clash in what it keeps (such as
    # the weight that a hook of weight_norm sets). One thread runs its stages in the order of the clock.
    #
    # With DTensors, all stages have one worker, which asks for collectives in the same order in every process, even if
    # stages share a process group. Backward on the CPU does too: the nodes' numbers determine its order. With a worker
    # per group, a stage could hold the lock on the process's random numbers while it waits in a collective for another
    # process that waits for this one in the same way: a deadlock.
    if any(map(sharded, stages)):
        return [0] * len(stages)
    state = [_state(layers) for layers in stages]
    first = list(range(len(stages)))  # For each stage, the first one with the same worker.
    for stage, place in enumerate(places[: len(stages)]):
        for other in range(stage):
            bound = place.device.type != "cpu" or state[other] & state[stage]
            one_row = rows is not None and rows[other] == rows[stage]
            if one_row or (places[other].device == place.device and bound):
                # A stage that shares with several merges their workers.
                joined, into = max(first[other], first[stage]), min(first[other], first[stage])
                first = [into if found == joined else found for found in first]
    numbers = sorted(set(first))
    return [numbers.index(found) for found in first]


def _state(layers: Sequence[nn.Module]) -> set[int]:
    """The identities of buffers, and of modules that have parameters; other modules keep little more than settings."""
    buffers = {id(buffer) for layer in layers for buffer in layer.buffers()}
    parts = {part for layer in layers for part in layer.modules()}
    return buffers | {id(part) for part in parts if next(part.parameters(), None) is not None}


def move(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> Callable[[], None]:
    """Moves each stage's layers to its device; returns a call that undoes it. If one can't be moved, none is."""
    parts = [part for layers in stages for layer in layers for part in layer.modules()]
    own: list[dict[str, Any]] = [table for part in parts for table in (part._parameters, part._buffers)]
    tables = [(table, dict(table)) for table in own]
    parameters = [tensor for _, was in tables[::2] for tensor in was.values() if tensor is not None]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    tensors = [*parameters, *(gradient for _, gradient in gradients if gradient is not None)]
    before = [(tensor, tensor.data) for tensor in tensors]

    def undo() -> None:
        for tensor, data in before:
            if moves_itself(tensor):
                moved(tensor, data.device)
            else:
                tensor.data = data
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for table, was in tables:
            table.update(was)

    try:
        for layers, place in zip(stages, places):
            for layer in layers:
                # Not layer.to(device), which may raise if the layer places its tensors itself, as a pipeline does.
                layer._apply(partial(_at, device=place.device))
    except BaseException:
        undo()
        raise
    return undo


def _at(x: Tensor, device: torch.device) -> Tensor:
    return moved(x, device) if moves_itself(x) else x.to(device)
