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

from collections import Counter
from collections.abc import Iterable

from torch import nn

from splitpipe.schedule.op import listed

#: The forwards of modules that are lists of others.
_LISTS = nn.Module.forward, nn.Sequential.forward


class Blocks:
    """The blocks and cuts of a module in its current state; the module, which may refer to this, isn't kept."""

    def __init__(self, module: nn.Module, cuts: Iterable[str]) -> None:
        #: The stage that starts with each cut's first call.
        self.cuts: dict[nn.Module, int] = {module.get_submodule(name): j for j, name in enumerate(cuts, 1)}
        self.blocks: dict[nn.Module, str] = {}
        self.opened: dict[nn.Module, str] = {}  #: Submodules with cuts inside.
        self._look(module, "")

    def _look(self, module: nn.Module, prefix: str) -> None:
        for own, child in module._modules.items():
            name = prefix + own
            if child is None or child in self.blocks or child in self.opened:
                continue
            if not called(child) or any([part in self.cuts for part in child.modules() if part is not child]):
                self.opened[child] = name
                self._look(child, name + ".")
            else:
                self.blocks[child] = name

    def described(self, module: nn.Module) -> str:
        """Describes a block, or a module with cuts inside, for a message."""
        return f"block {self.blocks.get(module, self.opened.get(module, ''))!r} ({type(module).__name__})"


def called(module: nn.Module) -> bool:
    """False for a container, which has no forward; torch.compile's wrapper has one on the instance."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def verify_cuts(module: nn.Module, cuts: object) -> list[str]:
    """The cuts as a list of distinct names of submodules that are called."""
    found: list[str] | None = listed(cuts)
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"cuts is {cuts!r}: expected a list of names, {_example(module)}.")
    modules = dict(module.named_modules(remove_duplicate=False))
    seen = {module}
    for number, name in enumerate(found):
        part = modules.get(name)
        if part is None or part in seen or not called(part):
            raise ValueError(
                f"cuts[{number}] is {name!r}: expected the names of submodules of {type(module).__name__}, each once, "
                f"and not of lists, which are never called, but of modules in them, {_example(module)}."
            )
        seen.add(part)
    return found


def _example(module: nn.Module) -> str:
    names = [*repeated(module)] or ["layers.4"]
    return f"such as cuts={[names[len(names) // 2]]}, as in module.named_modules()"


def repeated(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, by name, in the order of definition: those with submodules, or else all of them."""
    return dict(_inside(module, "", set(), False) or _inside(module, "", set(), True))


def no_blocks(module: nn.Module) -> ValueError:
    """The error for a module without repeated blocks."""
    return ValueError(
        f"module ({type(module).__name__}) has no repeated blocks: expected children of one module, of one class, such "
        "as the layers of a transformer. Choose the cuts: cuts=[...], the names of modules that start later stages."
    )


def _inside(module: nn.Module, prefix: str, seen: set[nn.Module], single: bool) -> list[tuple[str, nn.Module]]:
    """The repeated blocks inside a module that have submodules; with ``single``, all repeated ones."""
    children = {own: child for own, child in module._modules.items() if child is not None}
    kinds = Counter(map(type, children.values()))
    found: list[tuple[str, nn.Module]] = []
    for own, child in children.items():
        if child in seen:
            continue
        seen.add(child)
        repeats = called(child) and kinds[type(child)] > 1 and (single or bool(child._modules))
        within = not repeats or type(child).forward in _LISTS or type(module).forward not in _LISTS
        inner = _inside(child, f"{prefix}{own}.", seen, single) if within else []
        found += inner or ([(prefix + own, child)] if repeats else [])
    return found
