"""The repeated blocks of a module, such as the layers of a transformer, where it may be cut, found by structure."""
from __future__ import annotations

from collections import Counter

from torch import nn


def repeated(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, by name, in the order of definition: those with submodules, or else all of them."""
    return dict(_inside(module, "", set()) or _inside(module, "", set(), single=True))


def no_blocks(module: nn.Module) -> ValueError:
    """The error for a module without repeated blocks."""
    return ValueError(
        f"module ({type(module).__name__}) has no repeated blocks: expected children of one module, of one class, "
        "that are called in turn, such as the layers of a transformer. Choose the cuts: cuts=[...], "
        "the names of the submodules with which later stages start."
    )


def _inside(
    module: nn.Module, prefix: str, seen: set[nn.Module], single: bool = False
) -> list[tuple[str, nn.Module]]:
    """The repeated blocks inside a module that have submodules; with ``single``, all repeated ones."""
    children = {own: child for own, child in module._modules.items() if child is not None}
    kinds = Counter(map(type, children.values()))
    found: list[tuple[str, nn.Module]] = []
    for own, child in children.items():
        if child in seen:
            continue
        seen.add(child)
        called = type(child).forward is not nn.Module.forward
        repeats = called and kinds[type(child)] > 1 and (single or bool(child._modules))
        within = not repeats or _is_list(child) or not _is_list(module)
        inner = _inside(child, f"{prefix}{own}.", seen, single) if within else []
        found += inner or ([(prefix + own, child)] if repeats else [])
    return found


def _is_list(module: nn.Module) -> bool:
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)
