"""``hf_device_map``, written for a pipeline, and accelerate's hooks on a model that it has spread over devices."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from splitpipe.partition.blocks import Blocks

#: The attributes of a module that a hook sets; the last ones prevent moves.
_OWN = "_hf_hook", "_old_forward", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"
#: These attributes of each module with a hook.
Hooks = list[tuple[nn.Module, dict[str, Any]]]


def take_off(module: nn.Module) -> Hooks:
    """Removes the hooks with which accelerate brings inputs to devices; returns what ``put_back`` needs."""
    found: Hooks = []
    for part in module.modules():
        own = vars(part)
        hook = own.get("_hf_hook")
        kinds = {type(each).__name__ for each in getattr(hook, "hooks", (hook,))}  # A SequentialHook has several.
        if "_old_forward" in own and kinds == {"AlignDevicesHook"}:
            found.append((part, {name: own.pop(name) for name in _OWN if name in own}))
            forward = found[-1][1]["_old_forward"]
            if getattr(forward, "__func__", None) is not type(part).forward:
                own["forward"] = forward
    return found


def put_back(hooks: Hooks) -> None:
    """Puts the hooks back."""
    for part, own in hooks:
        vars(part).update(own)


def device_map(
    module: nn.Module, blocks: Blocks, stage_of: Mapping[nn.Module, int], devices: Sequence[torch.device]
) -> dict[str, torch.device]:
    """The devices by name of blocks, and of tensors in no block or on a different device.

    A parameter's device is that of the longest key that its name starts with. Keys are blocks, not whole containers, as
    PEFT looks up each layer. ``stage_of``: the stages that a call has found. Before that, they follow the definitions.
    """
    found: dict[str, torch.device] = {}
    homes: dict[int, torch.device] = {}  # Of tensors that several modules have: the device of the first of these.
    stage = 0
    for prefix, part in module.named_modules(remove_duplicate=False):
        block = part in blocks.blocks
        if not block and part not in blocks.opened and part is not module:
            continue
        stage = blocks.cuts.get(part, stage)
        device = devices[stage_of.get(part, stage)]
        if block:
            found[prefix] = device
        tensors = part.named_parameters(prefix, block, False), part.named_buffers(prefix, block, False)
        for name, x in chain.from_iterable(tensors):
            there = x.device if stage_of else homes.setdefault(id(x), device)
            if not block or there != device:
                found[name] = there
    return found
