"""What a block leaves in an attribute with a graph (``self.aux = router(x)``): it is None from the next stage on.

All microbatches share it, and code that reads it later would get any of theirs: gradients would be added to the wrong
graph, in silence. Where such tensors are left, the first microbatch of a first call shows, whose ops run one by one.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from splitpipe.microbatch.tree import hidden

_INTERNAL = frozenset(vars(nn.Module()))


class Attributes:
    """The attributes of a module in which its forward leaves tensors with a graph."""

    def __init__(self) -> None:
        #: By stage, since another one may be using its own right now: the names, modules and attributes.
        self.places: dict[int, set[tuple[str, nn.Module, str]]] = {}
        self.looks = False  #: Whether the current call shows them.

    def withdraw(self, stage: int, first: nn.Module | None = None) -> None:
        """Called when the code of a stage has run; ``first``: the module, if it was F of the first microbatch."""
        places = self.places.setdefault(stage, set())
        if first is not None and self.looks:
            found = {*_places(first)} - places
            places |= found
            _warn([name for name, _, _ in found], "it is None from the next stage on, and after the call")
        for _, part, own in places:
            if own in vars(part):
                _clear(vars(part), own)


def warn_of_losses(module: nn.Module) -> None:
    """Warns if layers of an nn.Sequential keep tensors with a graph: a loss outside would lack other microbatches."""
    names = [name for name, part, own in _places(module) if isinstance(vars(part)[own], Tensor)]  # A list may have all.
    _warn(names, "it is that of the last microbatch, and a loss outside that uses it lacks the others")


def _warn(names: list[str], then: str) -> None:
    if names:
        warnings.warn(
            f"the forward left {', '.join(map(repr, sorted(names)[:3]))}, a tensor with a graph, in an attribute of a "
            f"module, which all microbatches share: {then}. Keep it in a local variable, or return it.", stacklevel=3,
        )


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The plain attributes that hold tensors with a graph: names, modules and attributes."""
    for name, part in module.named_modules():
        for own, value in vars(part).items():
            if own in _INTERNAL or any([f"{own}_{end}" in part._parameters for end in ("orig", "g")]):
                continue  # A hook of spectral_norm, weight_norm or prune computes it before each forward.
            if _has_graph(value):
                yield f"{name}.{own}".strip("."), part, own


def _has_graph(value: Any) -> bool:
    return any([isinstance(x, Tensor) and x.grad_fn is not None for x in (value, *hidden(value, deep=False))])


def _clear(table: Any, name: Any) -> None:
    """Puts None in the place of what holds tensors with a graph; lists and dicts stay, since code adds to them."""
    value = table[name]
    if type(value) in (list, dict):
        for key in range(len(value)) if type(value) is list else [*value]:
            _clear(value, key)
    elif _has_graph(value):
        table[name] = None
