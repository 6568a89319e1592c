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
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.batch.division import Division
from splitpipe.core.tensors import version_of
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


@contextmanager
def noted(module: nn.Module, traces: list[Any]) -> Iterator[None]:
    """Records the shapes of tensors that the call inside leaves in attributes, and whether it writes to buffers."""
    kept = {where: x for where, _, _, x in _kept(module)}
    buffers = {name: (x, version_of(x)) for name, x in module.named_buffers()}
    yield
    left = {where: x.shape for where, _, _, x in _kept(module) if kept.get(where) is not x}
    now = {name: (x, version_of(x)) for name, x in module.named_buffers()}
    same = now.keys() == buffers.keys() and all(
        x is y and one == other for (x, one), (y, other) in zip(now.values(), buffers.values())
    )
    traces.append((left, same))


class Suspect(NamedTuple):
    """A tensor in a plain attribute that may belong to one microbatch; its dimensions with as many elements as rows."""

    where: str
    part: nn.Module
    attribute: str
    before: Any
    shape: torch.Size
    dims: list[int]


class Attributes:
    """Checks plain attributes of modules, which all microbatches share, in the first call with several microbatches."""

    def __init__(self) -> None:
        #: Whether nothing is to be checked any more.
        self.looked = False
        #: Tensors that may have the batch as a dimension; a run with another number of rows will show it.
        self.suspects: list[Suspect] = []

    @contextmanager
    def watched(self, module: nn.Module, rows: list[int]) -> Iterator[None]:
        """Looks for what the call inside the block leaves there, even if it fails; ``rows``: of each microbatch."""
        if self.looked or len(rows) == 1:
            yield
            return
        kept = {where: x for where, _, _, x in _kept(module)}
        held = [
            (part, {own: value for own, value in vars(part).items() if not _refers(value)}) for part in module.modules()
        ]
        try:
            yield
        except Exception:
            found = _verify(module, kept, rows, held)
            _warn([suspect for suspect in found if _likely(suspect, rows[0])], rows[0])  # This says less.
            raise
        self.suspects = _verify(module, kept, rows, held)
        self.looked = True

    def settle(self, division: Division, rehearsed: Callable[..., object]) -> None:
        """Warns of tensors whose size changes in a run with other rows, or, if there can't be one, of likely ones."""
        suspects, self.suspects = self.suspects, []
        if not suspects:
            return
        rows = [count for _, count in division.rows]
        other = next(count for count in range(1, len(rows) + 2) if count not in rows)
        found: list[Suspect] = []
        if other > sum(rows) or rehearsed(division, other, _again(suspects, found)) is None:
            found = [suspect for suspect in suspects if _likely(suspect, rows[0])]
        _warn(found, rows[0])


@contextmanager
def _again(suspects: list[Suspect], found: list[Suspect]) -> Iterator[None]:
    """Finds suspects whose size is different in a run with other rows, which starts from the same state."""
    for suspect in suspects:
        if suspect.before is _ABSENT:
            vars(suspect.part).pop(suspect.attribute, None)
        else:
            vars(suspect.part)[suspect.attribute] = suspect.before
    yield
    now = {where: x.shape for where, _, _, x in _kept_of(suspects)}
    for suspect in suspects:
        shape = now.get(suspect.where, ())
        if len(shape) == len(suspect.shape) and any(shape[dim] != suspect.shape[dim] for dim in suspect.dims):
            found.append(suspect)


def _refers(value: Any) -> bool:
    """True for weak references, such as nn.LSTM's to its parameters, which can't be moved while there is one."""
    return isinstance(value, list) and any(isinstance(x, weakref.ref) for x in value)


_ABSENT = object()


def _likely(suspect: Suspect, rows: int) -> bool:
    """True for a tensor whose shape suggests rows: [rows, ...], or a state of [layers, rows, width]."""
    return 0 in suspect.dims or 1 in suspect.dims and len(suspect.shape) > 2 and rows > 1


def _kept(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The tensors in plain attributes: their names, modules and attributes."""
    for name, part in module.named_modules():
        for own, value in vars(part).items():
            if own == "_parameters" or any(f"{own}_{end}" in part._parameters for end in ("g", "v", "orig")):
                continue  # Computed from these in each call, by weight_norm, spectral_norm or prune of torch.nn.utils.
            for number, x in _inside(value):
                yield f"{name}.{own}".strip(".") + (f", number {number}" if number else ""), part, own, x


def _inside(value: Any) -> Iterator[tuple[int, Tensor]]:
    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    for number, x in enumerate(inside):
        if isinstance(x, Tensor):
            yield number, x


def _kept_of(suspects: Iterable[Suspect]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for suspect in suspects:
        for number, x in _inside(vars(suspect.part).get(suspect.attribute)):
            if suspect.where.endswith(f", number {number}") or not number and ", number " not in suspect.where:
                yield suspect.where, suspect.part, suspect.attribute, x


_ADVICE = "Keep it in a local variable, or return it from the block"


def _verify(
    module: nn.Module, before: dict[str, Tensor], rows: list[int], held: list[tuple[nn.Module, dict[str, Any]]]
) -> list[Suspect]:
    """Raises for new tensors with a graph; returns others that have as many elements along a dimension as rows."""
    new = [each for each in _kept(module) if before.get(each[0]) is not each[3]]
    graphs = [where for where, _, _, x in new if x.grad_fn is not None]
    if graphs:
        raise RuntimeError(
            f"the forward left {', '.join(map(repr, graphs[:3]))}, a tensor with a graph, in an attribute of a "
            "module, which all microbatches share: code in the forward that reads it would get another microbatch's. "
            f"{_ADVICE}; detach it if nothing there reads it."
        )
    attributes = dict(held)
    found = []
    for where, part, own, x in new:
        dims = [dim for dim, size in enumerate(x.shape) if size in rows]
        if dims:
            found.append(Suspect(where, part, own, attributes.get(part, {}).get(own, _ABSENT), x.shape, dims))
    return found


def _warn(suspects: list[Suspect], rows: int) -> None:
    """Warns of tensors that belong to one microbatch."""
    if suspects:
        named = ", ".join(repr(suspect.where) for suspect in suspects[:3])
        warnings.warn(
            f"the forward left {named}, a tensor of {rows} rows, as many as a microbatch has, "
            "in an attribute of a module, which all microbatches share: code in the forward that reads it may get "
            f"another microbatch's. {_ADVICE}.",
            stacklevel=2,
        )


def called(module: nn.Module) -> bool:
    """False for a container, which has no forward; torch.compile's wrapper has one on the instance."""
    own = getattr(type(module), "forward", None)  # A scripted module's can't be read.
    return own is not nn.Module.forward or "forward" in vars(module)


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
