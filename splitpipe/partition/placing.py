"""An nn.Sequential cut into stages by balance, each on its device.

Everything is checked before anything moves.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splitpipe.core.dtensor import groups, sharded
from splitpipe.core.stream import Place, Stream, is_default
from splitpipe.partition.call_hook import compiled_call
from splitpipe.partition.moving import moved, moves_itself


def spans(balance: Sequence[int]) -> list[tuple[int, int]]:
    """First layer of each stage, and the one after its last."""
    ends = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return [(end - number, end) for end, number in zip(ends, balance)]


def _tensors(layers: Iterable[nn.Module]) -> dict[int, str]:
    """A name of each parameter and buffer of some layers, by identity."""
    found: dict[int, str] = {}
    for layer in layers:
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            found.setdefault(id(tensor), f"{type(layer).__name__}.{name}")
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
    config = vars(part).get("get_compiler_config") or getattr(compiled_call(part), "get_compiler_config", None)
    return config is not None and bool((config() or {}).get("triton.cudagraphs"))


def verify_sharing(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Refuses a parameter or buffer that stages on different devices would need at once."""
    faults = [
        f"  {name} of stage {stage} ({places[stage]}) is also in stage {home} ({places[home]})"
        for _, stage, name, home, _ in _shared_across_devices(map(_tensors, stages), places)
    ]
    if faults:
        raise ValueError(
            "the module shares parameters or buffers between stages on different devices:\n" + "\n".join(faults)
            + "\nA tensor lives on one device. Choose a balance that puts the layers that share it in one stage, name "
            "one device for these stages, or give each layer a copy of its own (copy.deepcopy)."
        )


def verify_groups(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Refuses a process group that stages on different devices have in common, where autograd goes backward itself."""
    # It has a thread for each device. Two threads that ask one group for collectives do so in another order in each
    # process, which waits forever then, or mixes up their values.
    faults = [
        f"  group {group!r} of {name} in stage {stage} ({places[stage]}) is also that of {known} in stage {home} "
        f"({places[home]})"
        for group, stage, name, home, known in _shared_across_devices(map(groups, stages), places)
    ]
    if faults:
        raise ValueError(
            "stages on different devices share a process group, and backward, which has a thread for each device, "
            "would ask it for collectives in another order in each process:\n" + "\n".join(faults)
            + "\nExpected a group for each stage: DeviceMesh.from_group(dist.new_group(ranks), device_type, "
            "mesh_dim_names=('a name of its own',)). Or choose a schedule, such as schedule='1f1b' with a loss_fn: one "
            "thread goes backward then, in the same order everywhere."
        )


def _shared_across_devices(
    stages: Iterable[dict[Any, str]], places: Sequence[Place]
) -> Iterator[tuple[Any, int, str, int, str]]:
    """The things that stages on different devices share: thing, stage, name there, first stage, name there."""
    first: dict[Any, tuple[int, str]] = {}
    for stage, found in enumerate(stages):
        for thing, name in found.items():
            home, known = first.setdefault(thing, (stage, name))
            if places[home].device != places[stage].device:
                yield thing, stage, name, home, known


def verify_streams(layers: Iterable[nn.Module], streams: Sequence[Stream]) -> None:
    """Refuses a forward whose gradients DistributedDataParallel would reduce behind another stream than theirs."""
    # Whichever of autograd's threads fills a bucket reduces it, and full ones behind it, whose devices may be others:
    # behind the stream that is current in that thread for the bucket's device, its default one. In the device's own
    # thread that is the stream of the last gradient alone. So gradients of other streams may be read before they are
    # there. Nothing of ours comes between: its hook copies the gradient into the bucket and reduces in one go.
    if all(map(is_default, streams)) or not torch.is_grad_enabled():
        return
    if len({(each.device_index, each.stream_id) for each in streams if each is not None}) == 1:
        return
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)  # Its forward runs, in any thread.
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    reduced = {id(parameter) for parameter in wrapper.module.parameters()}
    if any(id(parameter) in reduced for layer in layers for parameter in layer.parameters()):
        found = sorted({f"stream {each.stream_id} of {each.device}" for each in streams if each is not None})
        raise RuntimeError(
            "a SplitPipe inside DistributedDataParallel computes on streams that are not all their devices' default "
            f"ones: {', '.join(found)} (0 is the default). DistributedDataParallel starts to reduce the gradients of "
            "one device in the thread of another, on the default stream, and would read some before they are there. "
            "Expected devices that are named as devices, and a call outside of `with torch.cuda.stream(...)`."
        )


def workers(
    stages: Sequence[Sequence[nn.Module]], places: Sequence[Place], rows: Sequence[int] | None = None
) -> list[int]:
    """The worker of each stage: one for an accelerator; on the CPU one for a row, or for stages that share state."""
    # Two threads that update one buffer lose updates, and two that call one layer could meet in what it keeps (such as
    # the weight that a hook of weight_norm sets). One thread takes its stages in the order of the clock.
    #
    # With DTensors, all stages have one worker, which asks for collectives in the same order in every process, also
    # where stages share a process group. So does backward on the CPU, then: its order is given by the nodes' numbers.
    # With a worker for each group, a stage may have the process's random numbers to itself, and of two that wait in
    # collectives for each other's process meanwhile, each would keep the other from going on.
    if any(map(sharded, stages)):
        return [0] * len(stages)
    state = [_state(layers) for layers in stages]
    first = list(range(len(stages)))  # For each stage, the first one with the same worker.
    for stage, place in enumerate(places[: len(stages)]):
        for other in range(stage):
            bound = place.device.type != "cpu" or state[other] & state[stage]
            one_row = rows is not None and rows[other] == rows[stage]
            if one_row or (places[other].device == place.device and bound):
                # A stage that shares with several brings their workers together.
                joined, into = max(first[other], first[stage]), min(first[other], first[stage])
                first = [into if found == joined else found for found in first]
    numbers = sorted(set(first))
    return [numbers.index(found) for found in first]


def _state(layers: Sequence[nn.Module]) -> set[int]:
    """The identities of buffers, and of modules that have parameters: those without keep little more than settings."""
    buffers = {id(buffer) for layer in layers for buffer in layer.buffers()}
    parts = {part for layer in layers for part in layer.modules()}
    return buffers | {id(part) for part in parts if next(part.parameters(), None) is not None}


def move(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> Callable[[], None]:
    """Moves each stage's layers to its device; gives the call that undoes it. If one can't be moved, none is."""
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
                # Not layer.to(device), which a layer that places its own tensors, such as a pipeline, may refuse.
                layer._apply(partial(_at, device=place.device))
    except BaseException:
        undo()
        raise
    return undo


def _at(x: Tensor, device: torch.device) -> Tensor:
    return moved(x, device) if moves_itself(x) else x.to(device)
