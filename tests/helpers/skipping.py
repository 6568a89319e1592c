"""Layers that stash and pop: a plain pair, and those that are made of functions."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds to its input what it pops."""

    def forward(self, x: Tensor) -> Iterator[Any]:
        skip = yield pop("skip")
        return skip.exp() + x


def stashing(*names: str) -> type[nn.Module]:
    """Layers that stash, under these names, what a function makes of their input and of a linear layer."""

    class Give(nn.Module):
        def __init__(self, give: Callable[..., Any] = lambda x, layer: (layer(x), x.tanh())) -> None:
            super().__init__()
            self.layer, self.give = nn.Linear(4, 4), give

        def forward(self, input: Tensor) -> Iterator[Any]:
            *skips, output = self.give(input, self.layer)
            for name, skip in zip(names, skips):
                yield stash(name, skip)
            return output

    return skippable(stash=[*names])(Give)


def popping(*names: str) -> type[nn.Module]:
    """Layers that pop these names, in this order, and take a function of their input and of them."""

    class Take(nn.Module):
        def __init__(self, take: Callable[..., Tensor] = lambda x, scale, skip: x + scale * skip) -> None:
            super().__init__()
            self.scale, self.take = nn.Parameter(torch.randn(4)), take

        def forward(self, input: Tensor) -> Iterator[Any]:
            skips = []
            for name in names:
                skips.append((yield pop(name)))
            return self.take(input, self.scale, *skips)

    return skippable(pop=[*names])(Take)
