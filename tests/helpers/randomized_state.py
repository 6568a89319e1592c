"""Layers of random models that change themselves in forward: make what they lack, and touch their parameters."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.randomized_layers import WIDTH


def numbers(*shape: int, like: Tensor) -> Tensor:
    """The same numbers each time, which all dtypes have; with another tensor's dtype and device."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 7 - 3) / 4).reshape(shape).to(like.device, like.dtype)


def _linear(x: Tensor) -> nn.Linear:
    made = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        made.weight.copy_(numbers(WIDTH, WIDTH, like=x))
        made.bias.fill_(0.5)
    return made


class Counting(nn.Module):
    """A block that counts the rows which pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return self.layer(x)


class Making(nn.Module):
    """Makes in forward what it has not: a block, a parameter, buffers, a table that grows.

    Args:
        way: what it makes, and how it knows that it has.
    """

    WAYS = "block", "flag", "none", "parameter", "cache", "length", "attribute", "resized"

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.made, self.length = way, False, 0
        if way == "none":
            self.block = None
        if way in ("cache", "length"):  # Whose length may differ by rounding.
            self.register_buffer("table", torch.zeros(0), persistent=False)
        if way == "attribute":
            self.table = torch.zeros(0)
        if way == "resized":
            self.register_buffer("scale", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.way}")(x)

    def _block(self, x: Tensor) -> Tensor:
        if not hasattr(self, "block"):
            self.block = Counting(_linear(x))
        return self.block(x)

    def _flag(self, x: Tensor) -> Tensor:
        if not self.made:
            self.block = _linear(x)
            self.register_parameter("weight", nn.Parameter(numbers(WIDTH, like=x)))
            self.register_buffer("shift", numbers(WIDTH, like=x))
            self.made = True
        return self.block(x) * self.weight + self.shift

    def _none(self, x: Tensor) -> Tensor:
        if self.block is None:
            self.block = nn.Sequential(_linear(x), nn.Tanh())
        return self.block(x)

    def _parameter(self, x: Tensor) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(numbers(WIDTH, WIDTH, like=x))
        return F.linear(x, self.weight)

    def _cache(self, x: Tensor) -> Tensor:
        needed = WIDTH + min(60, int(x.detach().abs().max().nan_to_num()))
        if needed > (self.length if self.way == "length" else len(self.table)):
            self.length = needed
            self.table = torch.arange(needed, dtype=x.dtype, device=x.device) / 4
        return x * self.table[:WIDTH]

    _attribute = _length = _cache

    def _resized(self, x: Tensor) -> Tensor:
        if not self.scale.numel():
            self.scale.resize_(WIDTH).copy_(numbers(WIDTH, like=x))
        # Saved as it is, what another microbatch's recomputation writes again would be an error.
        return x * self.scale.to(x.dtype, copy=True)


def _hook(layer: Any) -> None:
    if layer.weight.requires_grad and not hasattr(layer, "handle"):
        layer.handle = layer.weight.register_hook(lambda grad: grad * 2)


def _freeze(layer: Any) -> None:
    layer.weight.requires_grad_(False)


def _replace(layer: Any) -> None:
    if not layer.replaced:
        layer.replaced = True
        layer.weight = nn.Parameter(layer.weight.detach() * 2, layer.weight.requires_grad)


def _mark(layer: Any) -> None:
    layer.weight.mark = 3


class Touching(nn.Module):
    """Does something to its parameter in forward, which a single forward of the whole batch would do as well."""

    TOUCHES: dict[str, Callable[[Any], None]] = {
        "hook": _hook, "freeze": _freeze, "replace": _replace, "mark": _mark, "grad": lambda layer: None,
    }

    def __init__(self, weight: nn.Parameter, kind: str) -> None:
        super().__init__()
        self.weight, self.kind, self.replaced = weight, kind, False

    def forward(self, x: Tensor) -> Tensor:
        self.TOUCHES[self.kind](self)
        weight, grad = self.weight, self.weight.grad
        scale = 1.0 if self.kind != "grad" or grad is None else 1 + grad.sum().tanh()
        return x * weight * scale * getattr(weight, "mark", 1)


class Closing(nn.Module):
    """Multiplies by a leaf that a closure holds; ``held`` is for those who look at its gradient."""

    def __init__(self, leaf: Tensor) -> None:
        super().__init__()
        self.held = [leaf]
        self.function = lambda x: x * leaf

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
