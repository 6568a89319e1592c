"""Small modules: with a forward of their own, to be cut by names; layers that stash and pop."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.skip import pop, skippable, stash


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module that has these parts, and this function as its forward."""
    made = type(forward.__name__, (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def linears(*names: str) -> dict[str, nn.Module]:
    """Small linear layers, to be parts of a module."""
    return {name: nn.Linear(4, 4) for name in names}


class Rows(nn.Module):
    """Two layers, and a forward that is a function of the module and its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 8), nn.Linear(8, 5), function

    def features(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(width, inner), nn.Linear(inner, width), nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.drop(self.two(torch.relu(self.one(x)))) * scale


class Net(nn.Module):
    """An embedding, blocks, and a head that is tied to it; it counts its calls, and gives a loss for labels."""

    def __init__(self, inner: tuple[int, ...] = (16, 16, 16), width: int = 8, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, size) for size in inner)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.embedding(ids)
        scale = x.detach().abs().mean(-1, keepdim=True)
        for block in self.blocks:
            x = block(x, scale)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(rows: int = 4, labels: bool = True) -> dict[str, Tensor]:
    """Arguments of a Net."""
    ids = torch.arange(rows * 5).view(rows, 5) % 12
    return {"ids": ids, "labels": ids.flip(1)} if labels else {"ids": ids}


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
