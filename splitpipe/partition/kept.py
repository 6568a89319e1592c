"""The tensors that modules keep in plain attributes."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from splitpipe.partition.stale import Stale


def kept_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The tensors in plain attributes: their names, modules and attributes."""
    for name, part in module.named_modules():
        for own, value in vars(part).items():
            if own == "_parameters" or any(f"{own}_{end}" in part._parameters for end in ("g", "v", "orig")):
                continue  # Computed from these in each call, by weight_norm, spectral_norm or prune of torch.nn.utils.
            for number, x in inside(value):
                yield f"{name}.{own}".strip(".") + (f", number {number}" if number else ""), part, own, x


def inside(value: Any) -> Iterator[tuple[int, Tensor]]:
    """The tensors in an attribute's value, numbered with what else is there."""
    for number, x in enumerate(_leaves(value)):
        if isinstance(x, Tensor):
            yield number, x


def _leaves(value: Any, depth: int = 3) -> Iterator[Any]:
    """What containers and dataclasses hold, in each other too."""
    if type(value) is Stale:
        return
    if isinstance(value, (list, tuple, deque)):
        inside = list(value)
    elif type(value) is dict:
        inside = list(value.values())
    elif is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        # No property that a subclass has in place of a field is called.
        inside = list(vars(value).values()) if hasattr(value, "__dict__") else [
            getattr(value, field.name, None) for field in fields(value)
        ]
    else:
        inside = []
    if not inside or not depth:
        yield value
    for x in inside if depth else ():
        yield from _leaves(x, depth - 1)
