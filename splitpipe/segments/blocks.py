"""The blocks of a module: the largest submodules that no cut lies inside of.

    model                       opened: it has cuts inside
    ├── embed_tokens            a block
    ├── layers                  opened; it has no forward of its own
    │   ├── 0, 1, 2, 3          blocks; cuts=["model.layers.2"]: stage 1 begins where that one is called
    └── norm                    a block

A block runs as a whole: what it computes with comes from its arguments and its parameters. Code between blocks, the
forwards of opened modules, runs under a function mode that sees what crosses from stage to stage.
"""
from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.schedule.op import listed
from splitpipe.schedule.plurals import counted


class Blocks:
    """The blocks and cuts of a module as it is now."""

    def __init__(self, module: nn.Module, cuts: Iterable[str]) -> None:
        self.module = module
        names = list(cuts)
        #: The stage that begins with each cut's first call.
        self.cuts: dict[nn.Module, int] = {module.get_submodule(name): j + 1 for j, name in enumerate(names)}
        self.blocks: dict[nn.Module, str] = {}
        self.opened: dict[nn.Module, str] = {module: ""}
        self._described: dict[nn.Module, str] = {}
        # By themselves: a module may have several names.
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
                f"{', '.join(missed)}: named in cuts=, and not called by the forward. Their stages have nothing to do: "
                "expected names of modules that it calls.",
                stacklevel=2,
            )

    def described(self, module: nn.Module) -> str:
        """A block, or a module with cuts inside, in a message."""
        found = self._described.get(module)
        if found is None:
            name = self.blocks.get(module, self.opened.get(module, ""))
            found = self._described[module] = f"block {name!r} ({type(module).__name__})"
        return found


def device_map(
    blocks: Blocks, stage_of: Mapping[nn.Module, int], devices: Sequence[torch.device], placed: bool
) -> dict[str, torch.device]:
    """The devices of blocks, by name, and of tensors that are in no block or not on its device; first stages first.

    The longest name that a parameter's begins with gives its device. Blocks and not whole containers, as PEFT looks
    for the name of each layer. ``placed``: a call has found the stages. Before, stages follow the order of definition.
    """
    found: dict[str, torch.device] = {}
    homes: dict[int, torch.device] = {}  # Of tensors that several modules have: with the first of these.
    defined: dict[nn.Module, int] = {}  # The stages of modules that have several names.

    coming, stage = [(blocks.module, "")], 0
    while coming:
        part, prefix = coming.pop()
        stage = defined.setdefault(part, blocks.cuts.get(part, stage))
        block = part in blocks.blocks
        device = devices[stage_of.get(part, stage)]
        tensors = _tensors(part, recurse=block)
        if placed and tensors and block and part not in stage_of:  # It is never called, and is where it was.
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


_EXAMPLE = 'such as cuts=["layers.4", "layers.8"], names of module.named_modules()'


class Attributes:
    """A look at plain attributes of modules, which all microbatches share, in the first call that has several."""

    def __init__(self) -> None:
        self._looked = False

    @contextmanager
    def watched(self, module: nn.Module, rows: list[int]) -> Iterator[None]:
        """Looks at what the call inside the block leaves there, though it fails; ``rows``: of each microbatch."""
        if self._looked or len(rows) == 1:
            yield
            return
        before = dict(_kept(module))
        try:
            yield
        except Exception:
            _verify(module, before, rows[0])  # Which tells more than what came of it.
            raise
        _verify(module, before, rows[0])
        self._looked = True


def _kept(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in plain attributes, and their names."""
    for name, part in module.named_modules():
        for own, value in vars(part).items():
            if own == "_parameters" or any(f"{own}_{end}" in part._parameters for end in ("g", "v", "orig")):
                continue  # Made of these for each call, by weight_norm, spectral_norm or prune of torch.nn.utils.
            inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
            for number, x in enumerate(inside):
                if isinstance(x, Tensor):
                    yield f"{name}.{own}".strip(".") + (f", number {number}" if number else ""), x


def _verify(module: nn.Module, before: dict[str, Tensor], rows: int) -> None:
    """Refuses new tensors with a graph, and warns of others with as many rows as a microbatch."""
    new = [(where, x) for where, x in _kept(module) if before.get(where) is not x]
    graphs = [where for where, x in new if x.grad_fn is not None]
    advice = "Keep it in a local variable, or return it from the block"
    if graphs:
        raise RuntimeError(
            f"the forward left {', '.join(map(repr, graphs[:3]))}, a tensor with a graph, in an attribute of a "
            "module, which all microbatches share: what reads it in the forward would find that of another one. "
            f"{advice}; detach it if nothing there reads it."
        )
    batches = [where for where, x in new if x.dim() and x.shape[0] == rows]
    if batches:
        warnings.warn(
            f"the forward left {', '.join(map(repr, batches[:3]))}, a tensor of {rows} rows as a microbatch has, "
            "in an attribute of a module, which all microbatches share: what reads it in the forward may find "
            f"that of another one. {advice}.",
            stacklevel=2,
        )


def called(module: nn.Module) -> bool:
    """False for a container, which has no forward; one of torch.compile's has it on the instance."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def verify_cuts(module: nn.Module, cuts: object) -> list[str]:
    """The cuts as a list of names of submodules that are called, each another."""
    found: list[Any] | None = None if isinstance(cuts, str) else listed(cuts)
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"cuts is {cuts!r}: expected a list of names, {_EXAMPLE}.")
    modules = dict(module.named_modules(remove_duplicate=False))
    faults = []
    for number, name in enumerate(found):
        part = modules.get(name)
        if not name or part is None:
            near = sorted({*modules} - {""}, key=lambda other: _distance(name, other))[:3]
            faults.append(f"cuts[{number}] is {name!r}, no submodule of {type(module).__name__}: is it {_any(near)}?")
        elif not called(part):
            inside = [f"{name}.{own}" for own in part._modules][:3]
            faults.append(
                f"cuts[{number}] is {name!r}, a {type(part).__name__}, which is never called: expected one of the "
                f"modules in it, such as {_any(inside)}"
            )
        else:
            same = [k for k, other in enumerate(found[:number]) if modules.get(other) is part]
            if same:
                faults.append(f"cuts[{number}] is {name!r}, the same module as cuts[{same[0]}]")
    if faults:
        raise ValueError("; ".join(faults) + f". Expected {counted(len(found), 'name')} of modules, {_EXAMPLE}.")
    return [str(name) for name in found]


def balance_of(module: object, cuts: Iterable[str]) -> list[int] | None:
    """The balance that says the same as cuts of a plain nn.Sequential's own layers; None for any other module."""
    names = None if isinstance(cuts, str) else listed(cuts)
    if type(module) is not nn.Sequential or names is None or not all(name in module._modules for name in names):
        return None
    layers = list(module._modules)
    starts = [0, *(layers.index(name) for name in names), len(layers)]
    if starts != sorted(set(starts)):
        raise ValueError(
            f"cuts is {names}: expected names of layers in their order, each once, and not the first layer, with which "
            "stage 0 begins."
        )
    return [end - start for start, end in zip(starts, starts[1:])]


def _distance(name: str, other: str) -> tuple[int, int, str]:
    """How far a name is from the one that was meant, roughly: parts in common first."""
    parts, others = set(name.split(".")), set(other.split("."))
    return -len(parts & others), abs(len(name) - len(other)), other


def _any(names: list[str]) -> str:
    return " or ".join(map(repr, names)) or "none: it has no submodules"
