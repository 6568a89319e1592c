"""The blocks of a module that repeat, as the layers of a transformer do: where it may be cut, by the look of it."""
from __future__ import annotations

from collections import Counter

from torch import nn


def repeated(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks that repeat, by name, in the order of definition: those that have parts, or else all of them."""
    return dict(_inside(module, "", set()) or _inside(module, "", set(), single=True))


def no_blocks(module: nn.Module) -> ValueError:
    """The error for a module without any."""
    return ValueError(
        f"module, a {type(module).__name__}, has no blocks that repeat: expected children of one module, of one class, "
        "that are called in turn, as the layers of a transformer are. Name the cuts yourself: SplitPipe(module, "
        "cuts=[...])."
    )


def _inside(
    module: nn.Module, prefix: str, seen: set[nn.Module], single: bool = False
) -> list[tuple[str, nn.Module]]:
    """The blocks inside a module that repeat, those that have parts; with ``single``, all of them."""
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
