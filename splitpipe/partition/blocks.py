"""The blocks of a module: the largest submodules without a cut inside.

    model                       opened: it has cuts inside
    ├── embed_tokens            a block
    ├── layers                  opened; it has no forward
    │   ├── 0, 1, 2, 3          blocks; cuts=["model.layers.2"]: stage 1 starts with this block's call
    └── norm                    a block

A block runs as a whole, and computes only with its arguments and parameters. Code between blocks, in the forwards of
opened modules, runs under a function mode that sees which values cross from stage to stage.
"""
from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.schedule.op import listed


class Blocks:
    """The blocks and cuts of a module in its current state."""

    def __init__(self, module: nn.Module, cuts: Iterable[str]) -> None:
        self.module = module
        names = list(cuts)
        #: The stage that starts with each cut's first call.
        self.cuts: dict[nn.Module, int] = {module.get_submodule(name): j + 1 for j, name in enumerate(names)}
        self.blocks: dict[nn.Module, str] = {}
        self.opened: dict[nn.Module, str] = {module: ""}
        self._described: dict[nn.Module, str] = {}
        # By module rather than name: a module may have several names.
        self._above = {
            module.get_submodule(name[:at]) for name in names for at, letter in enumerate(name) if letter == "."
        }
        self._look(module, "")

    def _look(self, module: nn.Module, prefix: str) -> None:
        for own, child in module._modules.items():
            name = prefix + own
            if child is None or child in self.blocks or child in self.opened:
                continue
            if child in self._above or not called(child):
                self.opened[child] = name
                self._look(child, name + ".")
            else:
                self.blocks[child] = name

    def warn_uncalled(self, called: Iterable[Container[nn.Module]]) -> None:
        """Warns of cuts that no stage has called."""
        stages = list(called)
        missed = [self.described(cut) for cut in self.cuts if all(cut not in each for each in stages)]
        if missed:
            warnings.warn(
                f"{', '.join(missed)}: named in cuts=, but not called by the forward, so their stages have nothing to "
                "do. Expected names of modules that it calls.",
                stacklevel=2,
            )

    def described(self, module: nn.Module) -> str:
        """Describes a block, or a module with cuts inside, for a message."""
        found = self._described.get(module)
        if found is None:
            name = self.blocks.get(module, self.opened.get(module, ""))
            found = self._described[module] = f"block {name!r} ({type(module).__name__})"
        return found


def device_map(
    blocks: Blocks, stage_of: Mapping[nn.Module, int], devices: Sequence[torch.device], placed: bool
) -> dict[str, torch.device]:
    """The devices by name of blocks, and of tensors in no block or on a different device; first stages first.

    A parameter's device is that of the longest key that its name starts with. Keys are blocks rather than whole
    containers, because PEFT looks up the name of each layer. ``placed``: a call has found the stages. Before that,
    stages follow the order of definition.
    """
    found: dict[str, torch.device] = {}
    homes: dict[int, torch.device] = {}  # Of tensors that several modules have: the device of the first of these.
    defined: dict[nn.Module, int] = {}  # The stages of modules that have several names.

    coming, stage = [(blocks.module, "")], 0
    while coming:
        part, prefix = coming.pop()
        stage = defined.setdefault(part, blocks.cuts.get(part, stage))
        block = part in blocks.blocks
        device = devices[stage_of.get(part, stage)]
        tensors = _tensors(part, recurse=block)
        if placed and tensors and block and part not in stage_of:  # It is never called, and stays where it was.
            device = tensors[0][1].device
        if block:
            found[prefix[:-1]] = device
        for name, x in tensors:
            there = x.device if placed else homes.setdefault(id(x), device)
            if not block or there != device:
                found[prefix + name] = there
        children = [] if block else [*part._modules.items()]
        coming += [(child, f"{prefix}{name}.") for name, child in reversed(children) if child is not None]
    order = [*devices, *found.values()]
    return dict(sorted(found.items(), key=lambda entry: order.index(entry[1])))


def _tensors(part: nn.Module, recurse: bool) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers, under all their names."""
    found = part.named_parameters(recurse=recurse, remove_duplicate=False)
    return [*found, *part.named_buffers(recurse=recurse, remove_duplicate=False)]


_EXAMPLE = 'such as cuts=["layers.4", "layers.8"], as in module.named_modules()'


def called(module: nn.Module) -> bool:
    """False for a container, which has no forward; torch.compile's wrapper has one on the instance."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def verify_cuts(module: nn.Module, cuts: object) -> list[str]:
    """The cuts as a list of distinct names of submodules that are called."""
    found: list[Any] | None = None if isinstance(cuts, str) else listed(cuts)
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"cuts is {cuts!r}: expected a list of names, {_EXAMPLE}.")
    modules = dict(module.named_modules(remove_duplicate=False))
    faults = []
    for number, name in enumerate(found):
        part = modules.get(name)
        if not name or part is None:
            near = sorted({*modules} - {""}, key=lambda other: _distance(name, other))[:3]
            faults.append(
                f"cuts[{number}] is {name!r}, not a submodule of {type(module).__name__} (did you mean {_any(near)}?)"
            )
        elif not called(part):
            inside = [f"{name}.{own}" for own in part._modules][:3]
            faults.append(
                f"cuts[{number}] is {name!r}, a {type(part).__name__}, which is never called: expected one of the "
                f"modules inside it, such as {_any(inside)}"
            )
        else:
            same = [k for k, other in enumerate(found[:number]) if modules.get(other) is part]
            if same:
                faults.append(f"cuts[{number}] is {name!r}, the same module as cuts[{same[0]}]")
    if faults:
        raise ValueError("; ".join(faults) + f". Expected names of submodules, {_EXAMPLE}.")
    return [str(name) for name in found]


def balance_of(module: object, cuts: Iterable[str]) -> list[int] | None:
    """The balance that is equivalent to cuts at a plain nn.Sequential's layers; None for any other module."""
    names = None if isinstance(cuts, str) else listed(cuts)
    if type(module) is not nn.Sequential or names is None or not all(name in module._modules for name in names):
        return None
    layers = list(module._modules)
    starts = [0, *(layers.index(name) for name in names), len(layers)]
    if starts != sorted(set(starts)):
        raise ValueError(
            f"cuts is {names}: expected names of layers in order, without repetition, and without the first layer, "
            "which starts stage 0."
        )
    return [end - start for start, end in zip(starts, starts[1:])]


def _distance(name: str, other: str) -> tuple[int, int, str]:
    """Roughly how far a name is from the intended one: common parts count first."""
    parts, others = set(name.split(".")), set(other.split("."))
    return -len(parts & others), abs(len(name) - len(other)), other


def _any(names: list[str]) -> str:
    return " or ".join(map(repr, names)) or "none: it has no submodules"
