"""Models that accelerate has spread over devices (``device_map="auto"``): their hooks and their device map."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

#: The attributes of a module that a hook sets; the last ones prevent moves.
_OWN = "_hf_hook", "_old_forward", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"
#: These attributes of each module with a hook.
Hooks = list[tuple[nn.Module, dict[str, Any]]]


def verify_resident(module: nn.Module) -> None:
    """Raises for parts whose weights are kept on the CPU or a disk, and brought to a device for each call."""
    away: dict[str, str] = {
        name: "offloaded" for name, part in module.named_modules() if _offloading(part)
    }
    found: dict[str, Any] = getattr(module, "hf_device_map", None) or {}
    several = len({*map(str, found.values())}) > 1
    away.update({name: str(device) for name, device in found.items() if several and str(device) in ("cpu", "disk")})
    if away:
        names = list(away)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{', '.join(map(repr, names[:3]))}{more}: accelerate keeps the weights of these on the CPU or a disk, and "
            "brings them to a device for each call. Expected a model whose weights are on the devices. Load it with "
            "device_map=splitpipe.device_map(model, devices), with more devices, or in fewer bits."
        )


def _offloading(part: nn.Module) -> bool:
    hook = vars(part).get("_hf_hook")
    several = getattr(hook, "hooks", (hook,))  # A SequentialHook.
    return any([bool(getattr(each, "offload", False)) for each in several])


def take_off(module: nn.Module) -> Hooks:
    """Removes the hooks with which accelerate brings inputs to devices; returns what ``put_back`` needs."""
    found: Hooks = []
    for part in module.modules():
        own = vars(part)
        if not _aligns(own.get("_hf_hook")) or "_old_forward" not in own:
            continue
        found.append((part, {name: own.pop(name) for name in _OWN if name in own}))
        forward = found[-1][1]["_old_forward"]
        if getattr(forward, "__func__", None) is not type(part).forward:
            own["forward"] = forward
    return found


def put_back(hooks: Hooks) -> None:
    """Puts the hooks back."""
    for part, own in hooks:
        vars(part).update(own)


def _aligns(hook: Any) -> bool:
    several = getattr(hook, "hooks", (hook,))
    return all([type(each).__name__ == "AlignDevicesHook" for each in several])


def device_map_of(module: nn.Module) -> dict[str, torch.device]:
    """The devices that a model was loaded to, by name; empty if it was loaded to one, or without a map."""
    found = getattr(module, "hf_device_map", None)
    if not isinstance(found, Mapping):
        return {}
    devices = {name: torch.device(device) for name, device in found.items()}
    return devices if len({*devices.values()}) > 1 else {}
